"""What :func:`dpivon.fit` does where a run is kept in a folder, or its data is not tensors: the engine, step by step.

The folder is that of ``dpivon train``: ``ledger.jsonl`` before every release, checkpoints, ``progress.jsonl``, ``config.yaml``,
``summary.json``, and ``model/`` that may be given away. The same call goes on where it was stopped or killed.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from dpivon._version import __version__
from dpivon.durable.checkpoint import Rotation
from dpivon.durable.data_digest import data_digest
from dpivon.durable.files import read_json, replace, sync_folder
from dpivon.durable.ledger import read as read_ledger
from dpivon.errors import bad
from dpivon.gaussian import GaussianNoise
from dpivon.machine import hardware_name
from dpivon.methods import Learner, describe
from dpivon.methods import method as make_method
from dpivon.optim.prior import as_prior
from dpivon.posterior import Posterior, SampledPosterior
from dpivon.privacy import Budget, PrivacyEngine
from dpivon.privacy.accounting.budget import Limit
from dpivon.privacy.accounting.history import History
from dpivon.privacy.accounting.recorded import CONFIG, LEDGER
from dpivon.privacy.augmentation import Augmentation, used
from dpivon.privacy.clipping import Clipping, make_clipping
from dpivon.privacy.export import export
from dpivon.privacy.kernels.reference import autocast
from dpivon.privacy.people import People
from dpivon.report.run_folder import SUMMARY
from dpivon.terminal import Bar
from dpivon.train.artefacts import Line, write_json
from dpivon.train.earlier import begin, check_ledger, marked
from dpivon.train.kept import Data, KeptRun, Rows, as_batch, at_once, loader_of
from dpivon.train.loop import Seeds
from dpivon.train.published import FOLDER

if TYPE_CHECKING:
    from dpivon.fit import Fitted


def train(
    model: nn.Module,
    data: Data,
    plan: Budget,
    *,
    out: str | Path | None,
    after: Fitted | None,
    also: History,
    target_epsilon: float | None,
    epochs: int,
    lr: float,
    max_grad_norm: float,
    method: str,
    options: Mapping[str, Any],
    loss: Callable[[Tensor, Tensor], Tensor],
    dtype: torch.dtype,
    seed: int | None,
    augment: Augmentation | None,
    clipping: str | Clipping,
    people: People | None,
    prior: Posterior | str | PathLike[str] | None,
    progress: bool | None,
    physical_batch_size: int | None,
    on_progress: Callable[[int, int], None],
    evaluate: Callable[[Learner], Mapping[str, float]] | None,
) -> tuple[nn.Module, Any, PrivacyEngine, str]:
    """A copy of the model at what was learned, the posterior, the engine with the account, and the path of the steps; trained,
    or found finished."""
    device = next(model.parameters()).device
    learner = _learner(model, plan.dataset_size, lr, method, dict(options), Seeds(seed), device)
    if prior is not None:
        prior = as_prior(prior)
        learner._take_prior(prior)
    settings: dict[str, Any] = {"method": method, "options": dict(options), "lr": lr, "epochs": epochs}
    settings |= {"batch_size": plan.batch_size, "dataset_size": plan.dataset_size, "max_grad_norm": max_grad_norm}
    settings |= {"noise_multiplier": plan.noise_multiplier, "epsilon": target_epsilon or plan.epsilon}
    settings |= {"delta": plan.delta, "accountant": plan.accountant, "dtype": str(dtype)}
    settings |= {"clipping": clipping if isinstance(clipping, str) else clipping.name}
    settings |= {"unit": "" if people is None else people.unit}
    settings |= {"augment": None if augment is None else asdict(augment)}
    settings |= {} if prior is None else {"prior": prior.digest}
    settings |= {"noise_std": loss.std} if isinstance(loss, GaussianNoise) else {}
    engine = PrivacyEngine(accountant=plan.accountant)
    before = None if after is None else after.ledger
    folder = None if out is None else _folder(Path(out), settings, before)
    finished = folder is not None and (folder / SUMMARY).exists()
    if folder is not None and finished:
        check_ledger(folder, "out")
    if folder is not None and after is not None and before is not None:
        begin(folder / LEDGER, marked(read_ledger(before), after.posterior.digest), "after", str(before.parent))
    elif after is not None:
        for sigma, rate, steps in after.history:
            engine.accountant.charge(noise_multiplier=sigma, sample_rate=rate, steps=steps)
    if folder is not None and finished:
        _check_data(folder, data, people)
        engine.attach_ledger(folder / LEDGER).close()
        engine._limit = _limit(settings, plan, also)
        on_progress(plan.steps, plan.steps)
        return *_finished(folder, model, device), engine, str(read_json("out", folder / SUMMARY, "Remove it")["path"])
    seen = used(augment)
    views = None if seen is None else _Views(seen, Seeds(seed))
    most = at_once(physical_batch_size, learner.model, data, device, 1 if seen is None else seen.views)
    made = _private(learner, engine, data, plan, views, device, max_grad_norm, clipping, people, Seeds(seed))
    learner._plan(plan.steps)
    engine._limit = _limit(settings, plan, also)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        with autocast(device, dtype):
            outputs = model(batch[0])
        return loss(outputs.float(), batch[1])

    run = KeptRun(
        folder,
        engine,
        learner,
        made,
        losses,
        epochs=epochs,
        delta=plan.delta,
        config=settings,
        physical_batch_size=most,
        also={} if views is None else {"views": views},
    )
    found = {} if evaluate is None else {"evaluate": lambda: {"not_private": dict(evaluate(learner))}}
    last: list[Line] = []

    bar = Bar(run.steps, lambda: run.epsilon, progress)

    def show(line: Line | None, step: int) -> None:
        last[:] = [line] if line is not None else last
        bar.at(step)
        on_progress(step, plan.steps)

    try:
        with bar:
            run.run(show, **found)
    finally:
        run.close()
    if folder is not None:
        _publish(folder, learner, run, settings, last[0].seconds if last else 0.0, device, secret=seed is None)
    posterior = learner.posterior()
    return _at_mean(model, learner.model.state_dict(), posterior), posterior, engine, run.step.path


def _limit(settings: Mapping[str, Any], plan: Budget, also: History) -> Limit:
    return Limit(settings["epsilon"], plan.delta, plan.noise_multiplier, plan.sample_rate, plan.steps, tuple(also))


def _check_data(folder: Path, data: Data, people: People | None) -> None:
    """Refuse other data than those that a finished run was trained on, as a run that goes on does."""
    state = Rotation(folder).read(tidy=False)
    if state is None:
        warnings.warn(
            f"{folder}: has no checkpoint left, so the data are not compared with those of its run.", stacklevel=4
        )
        return
    dataset = Rows(*data) if isinstance(data, tuple) else data
    found = data_digest(bytes(state["key"].tolist()), dataset, None if people is None else people.of_row)
    if found != state["data"]:
        fix = "Give the data it was begun with, or another folder"
        raise bad("out", str(folder), "holds a finished run on other data", fix)


def _finished(folder: Path, model: nn.Module, device: torch.device) -> tuple[nn.Module, Posterior | SampledPosterior]:
    """What a finished run has published."""
    sampled = folder / FOLDER / "samples.safetensors"
    kind: type[Posterior] | type[SampledPosterior] = SampledPosterior if sampled.exists() else Posterior
    posterior = kind.load(sampled if sampled.exists() else folder / FOLDER / "posterior.safetensors").to(device)
    return _at_mean(model, load_file(folder / FOLDER / "model.safetensors"), posterior), posterior


@torch.no_grad()
def _at_mean(model: nn.Module, state: Mapping[str, Tensor], posterior: Posterior | SampledPosterior) -> nn.Module:
    """A copy of the model that was given, at what was learned."""
    made = copy.deepcopy(model)
    made.load_state_dict(state)
    for name, value in posterior.mean.items():
        made.get_parameter(name).copy_(value)
    return made


def _learner(
    model: nn.Module, n: int, lr: float, method: str, options: dict[str, Any], seeds: Seeds, device: torch.device
) -> Learner:
    if "rescale_lr" in describe(method).defaults:
        options.setdefault("rescale_lr", False)  # fit's step size is the paper's
    averaged = {name: options.pop(name) for name in ("ema", "trace") if name in options}
    generator = seeds.generator("theta", device)
    learner = make_method(
        method, copy.deepcopy(model), dataset_size=n, lr=lr, generator=generator, **averaged, **options
    )
    learner.model.to(device)
    return learner


def _private(
    learner: Learner,
    engine: PrivacyEngine,
    data: Data,
    plan: Budget,
    views: _Views | None,
    device: torch.device,
    max_grad_norm: float,
    clipping: str | Clipping,
    people: People | None,
    seeds: Seeds,
) -> tuple[Any, Any, Any]:
    """``make_private`` of the learner, drawing from the operating system unless there is a seed."""
    own = seeds.seed is not None
    generator = seeds.generator("batches") if own else None
    loader = loader_of(data, device, plan.batch_size, generator, as_batch if views is None else views)
    if clipping == "per_layer":  # the same bound for every tensor, as in a stack
        trained = sum(p.requires_grad for p in learner.model.parameters())
        clipping = make_clipping("per_layer", [1.0] * trained, trained)
    made: tuple[Any, Any, Any] = learner.make_private(
        engine,
        loader,
        noise_multiplier=plan.noise_multiplier,
        max_grad_norm=max_grad_norm,
        dataset_size=plan.dataset_size,
        expected_batch_size=plan.batch_size,
        clipping=clipping,
        augmentations=1 if views is None else views.augment.views,
        noise_generator=seeds.generator("noise", device) if own else None,
        user_ids=people,
    )
    return made


class _Views:
    """Collates examples into their views, drawn from a generator that checkpoints keep."""

    def __init__(self, augment: Augmentation, seeds: Seeds) -> None:
        self.augment, self._generator = augment, seeds.generator("views")

    def __call__(self, rows: Any) -> tuple[Tensor, Tensor]:
        x, y = as_batch(rows)
        self.augment.check(x)
        n = self.augment.views
        words = torch.randint(2**32, (3, len(x), n), generator=self._generator)
        return self.augment.apply(x, self.augment.choice(words.to(x.device).unbind())), y.repeat_interleave(n, 0)

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._generator.set_state(state["generator"])


def _folder(folder: Path, settings: Mapping[str, Any], before: Path | None) -> Path:
    """New, empty but for the folder of the ledger ``before``, or that of a run that was begun so."""
    text = yaml.safe_dump(dict(settings), sort_keys=True)
    path = folder / CONFIG
    if path.exists():
        if path.read_text(encoding="utf-8") != text:
            fix = "Go on with the arguments it was begun with, or give another folder"
            raise bad("out", str(folder), "holds a run that was begun with other arguments", fix)
        return folder
    if folder.exists() and (not folder.is_dir() or any(before is None or p != before.parent for p in folder.iterdir())):
        raise bad("out", str(folder), "is not empty and holds no run", "Give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    replace(path, text.encode())
    return folder


def _publish(
    folder: Path,
    learner: Learner,
    run: KeptRun,
    settings: Mapping[str, Any],
    seconds: float,
    device: torch.device,
    *,
    secret: bool,
) -> None:
    """``model/`` from the newest checkpoint and the posterior, whole or not at all; then the summary that says so."""
    making = folder / ".model.tmp"
    shutil.rmtree(making, ignore_errors=True)  # of a process that was killed while it wrote
    spent = export(folder, making, settings["delta"], posterior=learner.posterior())
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    making.rename(folder / FOLDER)
    sync_folder(folder)
    summary = {
        "format": 1,
        "method": settings["method"],
        "epsilon": spent[settings["accountant"]],
        "delta": settings["delta"],
        "target_epsilon": settings["epsilon"],
        "accountant": settings["accountant"],
        "epsilon_by_accountant": spent,
        "adjacency": "add/remove",
        "dataset_size": settings["dataset_size"],
        "sampling_rate": settings["batch_size"] / settings["dataset_size"],
        "steps": run.done,
        "releases": read_ledger(folder / LEDGER).releases,
        "noise_multiplier": settings["noise_multiplier"],
        "max_grad_norm": settings["max_grad_norm"],
        "learning_rate": settings["lr"],
        "epochs": settings["epochs"],
        "seconds": seconds,
        "hardware": hardware_name(device),
        "path": run.step.path,
        "versions": {"dpivon": __version__, "torch": torch.__version__},
        "ledger_digest": hashlib.sha256((folder / LEDGER).read_bytes()).hexdigest(),
        "seed_is_secret": secret,
    }
    write_json(folder / SUMMARY, summary)
