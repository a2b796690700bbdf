"""The evaluation of a trained stack: run after run, and handed over in groups, so that a kill repeats one group at most.

A group is what is evaluated in about ``checkpoint_seconds``, by default a minute: how much work a crash may lose.

Forward passes are made where the runs are, in fp32 whatever they were trained in; on a GPU convolutions are in TF32, torch's
default. Predictions stay there and are scored there.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dpivon.data import MEAN, STD
from dpivon.durable.files import replace
from dpivon.durable.ledger import Terms
from dpivon.errors import PrivacyError
from dpivon.machine import one_thread
from dpivon.metrics import batch_scores
from dpivon.predict import ClassPrediction, entropy, prediction_of
from dpivon.privacy.mechanism import NoiseSpec
from dpivon.privacy.noise import SEEDED, TorchNoise
from dpivon.privacy.stack import StackedMechanism
from dpivon.privacy.temperature import BOUND, HALVINGS, choose, temperature_releases, temperature_spec
from dpivon.stacked import Network, Stack
from dpivon.study.plan.data import StudyData
from dpivon.study.plan.plan import sample_seed
from dpivon.study.results import table
from dpivon.study.results.folder import Results
from dpivon.study.run.progress import Left, Pace
from dpivon.temperature import log_probabilities, temper

if TYPE_CHECKING:
    from dpivon.study.run.work import Work

AT_ONCE = {"cuda": 5000, "cpu": 64}  # images: enough to fill a GPU; what stays in a core's cache

# At the "mean" and, with a posterior, the "average" of draws: one per set.
Predictions = dict[str, list[ClassPrediction]]


def posterior_row(stack: Stack, i: int) -> tuple[Tensor, Tensor]:
    """Mean (or the average of iterates, where the run keeps one) and standard deviation of run i."""
    row = stack._row(i)
    return stack.average[row], stack.std[row]


@torch.no_grad()
def predict_row(
    network: Network, mean: Tensor, std: Tensor, sets: Sequence[Tensor], *, samples: int, seed: int
) -> Predictions:
    """Predict several sets of images, all with the same draws."""
    rows, model = draw_rows(mean, std, samples=samples, seed=seed), network.model(mean).eval()
    parts = [
        _sums(network, model, rows, normalised(part))
        for images in sets
        for part in images.split(AT_ONCE.get(mean.device.type, AT_ONCE["cpu"]))
    ]
    first, total, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
    sizes, draws = [len(images) for images in sets], len(rows) - 1
    out = {"mean": [prediction_of(probs, entropy(probs), 0) for probs in first.split(sizes)]}
    if draws:
        pairs = zip((total / draws).split(sizes), (entropies / draws).split(sizes), strict=True)
        out["average"] = [prediction_of(probs, expected, draws) for probs, expected in pairs]
    return out


def scores(found: Mapping[str, Sequence[ClassPrediction]], labels: Tensor) -> dict[str, float]:
    """accuracy, nll, ece and brier on the first set, and mc_… of the average; NaN where the run has diverged."""
    names = {"mean": "", "average": "mc_"}
    each = batch_scores(torch.stack([predictions[0].probs for predictions in found.values()]), labels)
    out = {f"{names[way]}{k}": v for way, scores in zip(found, each, strict=True) for k, v in scores.items()}
    return out | ({"mc_samples": found["average"][0].samples} if "average" in found else {})


def draw_rows(mean: Tensor, std: Tensor, *, samples: int, seed: int) -> list[Tensor]:
    """Rows of parameters: the mean, and ``samples`` draws if there is a posterior."""
    if not bool((std > 0).any()):
        return [mean]
    generator = torch.Generator(mean.device).manual_seed(seed)
    draws = (torch.randn(mean.shape, generator=generator, device=mean.device) for _ in range(samples))
    return [mean, *(mean + std * eps for eps in draws)]


def normalised(images: Tensor) -> Tensor:
    """Bytes as a network takes them; images that are normalised already stay as they are."""
    return images.float().div(255).sub(MEAN).div(STD) if images.dtype == torch.uint8 else images


def _sums(network: Network, model: nn.Module, rows: Sequence[Tensor], images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities at the first row, and sums over the others of probabilities and of their entropies."""
    if not images.is_cuda and images.dim() == 4:  # a CPU is about twice as fast so; a GPU's norms want channels first
        images = images.contiguous(memory_format=torch.channels_last)
    first, *others = (network.load(row, model)(images).softmax(-1) for row in rows)
    none = first.new_zeros(len(first), dtype=torch.float64)
    return first, sum(others, torch.zeros_like(first)), sum((entropy(probs) for probs in others), none)


ASKED = "asked.json"


class ChangedSum(Exception):
    """A sum that differs from the one that was recorded."""


class TemperatureQueries:
    """Private temperatures of a stack's runs: k noisy sums over the training data each, recorded on disk before they are drawn.

    The runs are evaluated in groups, but the ledger charges all of them alike, so all are charged for k answers before the
    first group asks. ``asked.json`` in ``folder`` then gets a keyed digest of every sum before noise is added to it. After a
    crash the same sums are asked again and get the same noise, so the answers are those that were lost. Where a sum differs,
    or the file is gone, noise is new and all runs are charged once more.

    ``ahead`` is called before a charge is made and before the file is written: it raises where a newer process works on the
    stack.
    """

    def __init__(
        self,
        folder: Path,
        mechanism: StackedMechanism,
        noise_multiplier: float,
        ahead: Callable[[Terms, int], None],
    ) -> None:
        self.path, self.mechanism, self.ahead = folder / ASKED, mechanism, ahead
        self.spec = temperature_spec(noise_multiplier).replace(drawn_by=(SEEDED, SEEDED))
        self.at, self.sums = self._read()  # the number of the first answer's release; digests by run and halving

    def cover(self) -> None:
        """Charge every run for its answers, unless that was done."""
        assert self.mechanism.ledger is not None
        record = self.mechanism.ledger.record
        if self.at < 0 or any(record.terms_at(self.at + i) != self._terms for i in range(HALVINGS)):
            self.charge()

    def charge(self) -> None:
        """Charge every run for new answers. The file is written first: it says what the charge is for."""
        self.at, self.sums = self.mechanism.charged, {}
        self._write()
        self.mechanism.charge_beside(self.spec, HALVINGS)

    def covers(self, spec: NoiseSpec) -> None:
        """Stand in for a charge that was made before."""
        if spec.terms != self.spec.terms:
            raise PrivacyError(f"{self.path}: covers {self.spec.terms}, not {spec.terms}. Charge it by itself.")

    def seed(self, seed: int) -> int:
        """The seed of a run's noise: its own for its first answers, another whenever it is charged again."""
        assert self.mechanism.ledger is not None
        record = self.mechanism.ledger.record
        if temperature_releases(record) == temperature_releases(record, since=self.at):
            return seed
        return int.from_bytes(hashlib.sha256(f"{seed} temperature {self.at}".encode()).digest()[:8], "big") >> 1

    def questions(self, runs: Sequence[str]) -> Callable[[Sequence[Tensor]], None]:
        """A callback for runs that ask together, halving by halving: records their sums, or raises if one has changed."""
        step = 0

        def before(sums: Sequence[Tensor]) -> None:
            nonlocal step
            at, step = self.at + step, step + 1
            new = False
            for run, total in zip(runs, torch.stack(list(sums)).double().cpu(), strict=True):
                noted, evidence = self.sums.setdefault(run, []), self.mechanism.evidence(total, at)
                if len(noted) < step:
                    noted.append(evidence)
                    new = True
                elif noted[step - 1] != evidence:
                    raise ChangedSum
            if new:
                self._write()

        return before

    @property
    def _terms(self) -> Terms:
        return self.mechanism.named([self.spec.terms] * len(self.mechanism.specs))

    def _read(self) -> tuple[int, dict[str, list[str]]]:
        """A file that is missing or damaged covers nothing."""
        try:
            found = json.loads(self.path.read_text())
            return int(found["at"]), {str(run): list(map(str, sums)) for run, sums in found["sums"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return -1, {}

    def _write(self) -> None:
        """Write the file, unless a newer process has taken over. Locks keep an older one from the folder, but where they do not
        hold it would replace newer queries; asked again, those could get the noise that another sum has had."""
        self.ahead(self._terms, self.at + HALVINGS)
        replace(self.path, json.dumps({"at": self.at, "sums": self.sums}).encode())


@dataclass(frozen=True, eq=False)
class RunPredictions:
    """Probabilities on the test set and on the training data, and the seed of the run's noise."""

    test: Tensor
    training: Tensor
    seed: int


@one_thread()
@torch.no_grad()
def tempered_scores(
    queries: TemperatureQueries, data: StudyData, predictions: Mapping[str, RunPredictions], *, noise_multiplier: float
) -> dict[str, dict[str, float]]:
    """The temperature of every run, by its id, and its scores after it; NaN where the run has diverged."""
    training = [_usable(run.training) for run in predictions.values()]
    labels = data.labels.to(training[0].device)
    log_probs = [log_probabilities(probs) for probs in training]
    queries.cover()
    while True:
        noises = [_HostNoise(queries.seed(run.seed)) for run in predictions.values()]
        try:
            before = queries.questions(list(predictions))
            found = choose(log_probs, labels, noise_multiplier, BOUND, HALVINGS, noises, queries.covers, before)
            break
        except ChangedSum:
            queries.charge()
    return {
        run: _scores(temperature, predictions[run].test, data)
        for run, (temperature, _) in zip(predictions, found, strict=True)
    }


class _HostNoise:
    """Drawn on the host wherever the sum is: a study's seeds are public, and its noise is the same on every machine."""

    origin = SEEDED

    def __init__(self, seed: int) -> None:
        self._noise = TorchNoise(torch.Generator().manual_seed(seed))

    def normal(self, like: Tensor, std: float) -> Tensor:
        return self._noise.normal(like.cpu(), std).to(like.device)


def _scores(temperature: float, probs: Tensor, data: StudyData) -> dict[str, float]:
    tempered = temper(probs, temperature) if bool(torch.isfinite(probs).all()) else probs
    (after,) = batch_scores(tempered.unsqueeze(0), data.eval_labels)
    return {"temperature": temperature} | {f"tempered_{key}": value for key, value in after.items()}


def _usable(probs: Tensor) -> Tensor:
    """Uniform for a run that has diverged; the others still get their temperature."""
    return probs if bool(torch.isfinite(probs).all()) else torch.full_like(probs, 1.0 / probs.shape[1])


Keep = Callable[[Results], None]


@dataclass
class _Group:
    """Runs that are evaluated and not handed over yet."""

    began: float
    places: list[int] = field(default_factory=list)
    rows: list[table.Row] = field(default_factory=list)
    predictions: dict[str, RunPredictions] = field(default_factory=dict)


class StackEvaluation:
    """``places`` are the runs of the stack to evaluate. What a run's row says does not depend on its group."""

    def __init__(self, work: Work, places: Sequence[int]) -> None:
        self.work, self.places = work, list(places)
        plan, data = work.plan, work.data
        self.sets = [data.eval_images, *([data.images] if plan.temperature_noise else [])]
        each = sum(map(len, self.sets))
        rows = [1 + plan.mc_samples * wide for wide in (work.stack.std > 0).any(1).tolist()]
        self.passes = [each * rows[work.stack._row(i)] for i in range(len(work.runs))]  # of every run of the stack
        self.pace = Pace()
        self.queries = TemperatureQueries(work.folder, work.stack.mechanism, plan.temperature_noise, work.custody.ahead)

    def evaluate(self, keep: Keep, stop: Callable[[], bool]) -> bool:
        """Hand every group to ``keep``, until ``stop`` says so between two runs; True when all are evaluated."""
        self._tell(0)
        group, stopped = _Group(time.monotonic()), False
        for done, i in enumerate(self.places):
            if stopped := stop():
                break
            began = time.monotonic()
            self._evaluate_run(i, group)
            self.pace.add(self.passes[i], time.monotonic() - began)
            self._tell(done + 1)
            if time.monotonic() - group.began >= self.work.settings.checkpoint_seconds:
                self._hand_over(group, keep)
                group = _Group(time.monotonic())
        self._hand_over(group, keep)
        return not stopped

    def _evaluate_run(self, i: int, group: _Group) -> None:
        work, run = self.work, self.work.runs[i]
        draws = {"samples": work.plan.mc_samples, "seed": sample_seed(work.plan, run)}
        mean, std = posterior_row(work.stack, i)
        found = predict_row(work.stack.network, mean, std, self.sets, **draws)
        row = scores(found, work.data.eval_labels)
        if work.plan.temperature_noise:
            test, training = (each.probs for each in found.get("average", found["mean"]))
            group.predictions[run.id] = RunPredictions(test, training, work.stack.runs[work.stack._row(i)].seed)
        work.evaluated += 1
        group.places.append(i)
        group.rows.append(work.facts(i) | work.last_diagnostics(run.id) | row)

    def _hand_over(self, group: _Group, keep: Keep) -> None:
        work = self.work
        if not group.rows:
            return
        if group.predictions:  # last, since it is a release: what was scored before cost what it says
            work.progress.say(f"{work.title}: choosing {len(group.predictions)} temperatures")
            noise = work.plan.temperature_noise
            found = tempered_scores(self.queries, work.data, group.predictions, noise_multiplier=noise)
            for i, row in zip(group.places, group.rows, strict=True):
                row |= found[row["id"]] | {"epsilon_tempered": work.stack.epsilon(i, work.plan.delta)}
        ids = {row["id"] for row in group.rows}
        diagnostics = [d for d in work.diagnostics if d["id"] in ids]
        posteriors = {work.runs[i].id: work.posterior(i) for i in group.places} if work.settings.keep else {}
        keep(Results(group.rows, diagnostics, posteriors))

    def _tell(self, done: int) -> None:
        """How far it is, of all runs of the stack."""
        work, total = self.work, len(self.work.runs)
        left = Left(sum(self.passes[i] for i in self.places[done:]), len(self.places) - done, self.pace)
        number = min(total, total - left.runs + 1)
        words = f"evaluating run {number} of {total}"
        work.progress.evaluating(left, lambda: f"{work.title} · {words}")
        work.note(words + left.words)
