"""The recipe for private training with calibrated probabilities and one default for every ε.

Its parts and their reasons (docs/strong-privacy.md has the measurements):

1. **A step in units of the weights** (``dp-steady``): α = 3.5 w/√T, divided by the root mean square over all weights of what is
   released, whose noise is known. It is gradient descent's direction, and σ, C, b and T drop out of the choice of its length.
   Where T is below 400 the first steps climb to it.
2. **Averaged iterates** over the last tenth of the training: noise moves every iterate, and averaging loses most of it.
3. **A posterior from the spread of the iterates** in that window; predictions average over draws of it. Its variance is a
   quarter of theirs where there is a temperature, which does most of what width is for, and all of it where there is none.
4. **A private temperature**, chosen on the training data itself and charged to the same account. Training under privacy
   can hardly fit examples one by one, so training data tell the temperature nearly as well as held-out data, and no example is
   held out of the training. It gets an ε of ``temperature_share`` of the whole by itself; since costs add up in squares, the
   training pays for it with about a hundredth of its budget. Where the data are so few that noise would blur the mean of
   surprise less entropy by more than ``WORTH``, it is left out, and training has the whole budget: that depends on N, ε and
   δ alone, all public.

**From a prior** (``start_from``, docs/priors.md) the last layer is new and zero, and passes no gradient, so a first step would
move all other weights by noise alone. It is trained by itself for a twelfth of the epochs. Then all weights are, at r = 2.25,
with w that of torch's own initialisation: self-supervised weights are two to four times as large, and want no larger steps for
it. Every step has the σ of a single training of as many steps.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dpivon.defaults import METHOD
from dpivon.durable.files import read_json, replace
from dpivon.errors import BudgetSpent, PrivacyWarning, bad, check_number, check_whole
from dpivon.fit import Fitted, fit, seed_after
from dpivon.optim.curvature import matrix
from dpivon.optim.steady import weight_scale
from dpivon.posterior import Posterior
from dpivon.priors.start import check_free, last_layer
from dpivon.priors.start import start_from as start
from dpivon.privacy import Accountant, Budget, PrivacyEngine, budget
from dpivon.privacy.accounting import DEFAULT
from dpivon.privacy.accounting.recorded import LEDGER
from dpivon.privacy.people import People
from dpivon.privacy.temperature import BOUND, calibrate_temperature, temperature_cost, temperature_noise
from dpivon.report.run_folder import SUMMARY
from dpivon.stacked.run import Run
from dpivon.temperature import Tempered

#: How much of the iterates' spread is width, with a temperature and without.
WIDTH, WIDTH_ALONE = 0.25, 1.0

#: What a kept run's temperature is in.
TEMPERATURE = "temperature.json"

#: From a prior: one of so many epochs is of the last layer alone, r of all weights after it, and the first ones' folder.
HEAD_PART, AFTER_HEAD, HEAD = 12, 2.25, "head"

#: Nats. A miscalibration smaller than this is not worth a release.
WORTH = 0.02


def steady(
    model: nn.Module,
    inputs: Tensor | Dataset[Any],
    labels: Tensor | None = None,
    *,
    target_epsilon: float,
    delta: float,
    batch_size: int,
    epochs: int,
    start_from: str | os.PathLike[str] | Posterior | None = None,
    max_grad_norm: float = 1.0,
    temperature_share: float = 0.1,
    samples: int = 32,
    accountant: str = DEFAULT,
    seed: int | None = None,
    **options: Any,
) -> Tempered:
    """Train a copy of a classifier by the recipe, all of it within (ε, δ).

    >>> trained = dpivon.steady(model, x, y, target_epsilon=1, delta=1e-5, batch_size=512, epochs=30)
    >>> trained.predict(test_x).probs, trained.temperature, trained.predictor.account.get_epsilon(1e-5)

    ``predictor`` of what it returns is the :class:`dpivon.Fitted`; ``temperature`` is 1 where none was worth its cost.
    Larger batches and more epochs cost computing time. More of both helped on CIFAR-10; more epochs did
    not always help on small tables (docs/methods.md).

    Args:
        model: the classifier; it is copied.
        inputs: as the model takes them, normalised by public constants, one example per row.
        labels: one per example.
        target_epsilon: ε of everything together.
        delta: δ, well below 1/N.
        batch_size: the expected batch b.
        epochs: length of the run, in epochs of ⌈N/b⌉ steps.
        start_from: begin with the weights of a prior that no one's data is in, and a new last layer that is trained first: a
            name such as ``"images-32"``, a file of ``dpivon prior learn`` or a :class:`dpivon.Posterior`, as
            :func:`dpivon.priors.start_from` takes them. This is where weights begin; ``prior=`` pulls every step.
        max_grad_norm: C.
        temperature_share: the part of ε that the temperature would cost by itself; composed with training it is far less.
        samples: the draws that the temperature is chosen for; predict with as many.
        accountant: as in :func:`~dpivon.fit.fit`.
        seed: as in :func:`~dpivon.fit.fit`: leave it out unless the data is public.
        **options: of :func:`~dpivon.fit.fit`, such as ``out=`` for a run that is kept, ``dtype=``, ``lr=`` for another r than
            3.5, or ``options={"ramp": 0}`` for first steps of full size however few there are. With ``start_from`` these two
            are of the steps of all weights. With ``user_ids`` no temperature is chosen: its guarantee is for rows.
    """
    share = check_number("temperature_share", temperature_share, "Use about 0.1", above=0.0, below=1.0)
    target = check_number("target_epsilon", target_epsilon, "Use a value such as 3.0", above=0.0)
    sigma = temperature_noise(share * target, delta, accountant=accountant)
    given: Any = inputs
    people = People.given(options.get("user_ids"), options.get("rows_per_user"))
    n = options.get("dataset_size") or len(given if people is None else people)
    worth = people is None and blur(sigma, n) <= WORTH
    own = {"trace": WIDTH if worth else WIDTH_ALONE, **dict(options.pop("options", None) or {})}
    plan: dict[str, Any] = {"batch_size": batch_size, "delta": delta, "accountant": accountant}
    plan["also"] = [temperature_cost(sigma)] if worth else None
    shared = dict(**plan, method=METHOD, max_grad_norm=max_grad_norm, seed=seed, options=own, **options)
    shared |= {"inputs": inputs, "labels": labels}
    body = []
    if start_from is not None:
        model = copy.deepcopy(model)
        body = _begin(model, start_from)
    if body:
        alone = options.get("noise_multiplier")  # refused beside ε
        whole = budget(dataset_size=n, epochs=epochs, target_epsilon=target, noise_multiplier=alone, **plan)
        fitted = _head_first(model, body, whole, epochs, shared)
    else:
        fitted = fit(model, **shared, epochs=epochs, target_epsilon=target)
    if not worth:
        return Tempered(fitted, 1.0)
    chosen: dict[str, Any] = {"noise_multiplier": sigma, "samples": samples}
    own_seed = None if seed is None else seed ^ 0x7E3F
    own_seed = own_seed if options.get("after") is None else seed_after(own_seed, options["after"])
    chosen["generator"] = None if own_seed is None else torch.Generator().manual_seed(own_seed)
    data: Any = (inputs, labels) if labels is not None else DataLoader(inputs, batch_size=1024)  # type: ignore[arg-type]
    if isinstance(fitted.account, Accountant) or options.get("out") is None:
        return calibrate_temperature(fitted, data, account=fitted.account, **chosen)
    return _kept_temperature(fitted, data, Path(options["out"]), chosen)


def _begin(model: nn.Module, start_from: Any) -> list[str]:
    """Put a prior into the model; the names of the trained parameters before its last layer."""
    last = f"{last_layer(model)}."
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    body = [name for name in trained if not name.startswith(last)]
    if len(body) == len(trained):
        problem = f"begins with a new last layer, and {last}weight is frozen"
        raise bad("start_from", start_from, problem, "Set its requires_grad, or leave start_from out")
    fix = "Give fit its Fitted as after=. If no one's private data is in it, give Posterior(its mean, its variance)"
    check_free(start(model, start_from), start_from, fix)
    return body


def _head_first(model: nn.Module, body: list[str], plan: Budget, epochs: int, shared: dict[str, Any]) -> Fitted:
    """The last layer alone, then all weights: two trainings within one plan, of which the second comes after the first."""
    epochs = check_whole("epochs", epochs, "Use 2 or more, better 12", at_least=1)
    first = -(-epochs // HEAD_PART)
    if first == epochs:
        fix = "Give 2 or more, better 12, or leave start_from out"
        raise bad("epochs", epochs, "is too few for two phases, the last layer alone and all weights", fix)
    if shared.get("after") is not None:
        raise bad("after", "Fitted", "was given with start_from, which begins anew", "Leave one of them out")
    folder = None if shared.get("out") is None else Path(shared["out"])
    if folder is not None and folder.exists() and not folder.is_dir():
        raise bad("out", str(folder), "is a file", "Give a folder")
    if folder is not None and folder.is_dir() and any(folder.iterdir()) and not (folder / HEAD).is_dir():
        raise bad("out", str(folder), "is not empty, and no run from a prior was begun in it", "Give another folder")
    if folder is not None and (folder / LEDGER).exists() and not (folder / HEAD / SUMMARY).exists():
        problem = f"has begun to train all weights, and the finished run of the last layer in {HEAD}/ is gone"
        raise bad("out", str(folder), problem, f"Put {HEAD}/ back as it was, or give another folder")
    shared, steps = {**shared, "noise_multiplier": plan.noise_multiplier}, plan.steps // epochs * first
    lr, own, also, say = (shared.pop(name, None) for name in ("lr", "options", "also", "on_progress"))
    lr, say = AFTER_HEAD if lr is None else lr, say or (lambda done, steps: None)
    # What the second training would refuse is refused before the first releases anything.
    Run(METHOD, 0, plan.noise_multiplier, shared["max_grad_norm"], lr, plan.batch_size, own)
    for name in body:
        model.get_parameter(name).requires_grad_(False)
    alone = {**shared, "out": folder and folder / HEAD, "on_progress": lambda done, _: say(done, plan.steps)}
    head = fit(model, **alone, epochs=first)
    learned = [head.model.get_parameter(name).requires_grad_() for name in body]
    drawn = [torch.zeros_like(p) for p in learned]  # of which the scale is that of an initialisation
    shared["options"] = {"scale": weight_scale(drawn, [matrix(p.shape) for p in drawn]), **own}
    shared |= {"lr": lr, "also": also, "after": head, "on_progress": lambda done, _: say(steps + done, plan.steps)}
    return dataclasses.replace(fit(head.model, **shared, epochs=epochs - first), budget=plan)


def _kept_temperature(fitted: Fitted, data: Any, folder: Path, chosen: Mapping[str, Any]) -> Tempered:
    """The temperature that the folder has; or one that is chosen now, charged to its ledger and kept."""
    path, engine = folder / TEMPERATURE, fitted.account
    assert isinstance(engine, PrivacyEngine)
    if path.exists():
        return Tempered(fitted, float(read_json("out", path, "Remove it")["temperature"]))
    again = PrivacyEngine(accountant=fitted.budget.accountant, ledger=folder / LEDGER)
    again._limit = engine._limit
    fitted = dataclasses.replace(fitted, account=again)
    try:
        found = calibrate_temperature(fitted, data, account=again, **chosen)
    except BudgetSpent:
        message = "The budget has no room for a temperature: one was charged before and not kept. It is 1."
        warnings.warn(message, PrivacyWarning, stacklevel=3)
        return Tempered(fitted, 1.0)
    finally:
        assert again.ledger is not None
        again.ledger.close()
    replace(path, (json.dumps({"temperature": found.temperature, "answers": found.answers}) + "\n").encode())
    return found


def blur(noise_multiplier: float, examples: int) -> float:
    """Standard deviation of the noise in the mean of surprise less entropy that a temperature is chosen by, in nats."""
    sigma, _, _ = temperature_cost(noise_multiplier)
    return sigma * BOUND / examples
