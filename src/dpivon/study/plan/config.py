"""Studies as people write them: YAML, validated. A list in place of a number means all of them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from dpivon.errors import bad
from dpivon.privacy.accounting import budget
from dpivon.privacy.augmentation import Augmentation, used
from dpivon.study.plan.data import architecture, train_size
from dpivon.study.plan.own_data import Data, declarations, planned
from dpivon.study.plan.plan import Evaluation, OwnData, Plan, PlannedRun
from dpivon.study.results.tuning import Rates, read_rates
from dpivon.yaml_files import read_yaml, validated

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=1, le=10**9)]
Name = Annotated[str, Field(pattern=r"^[a-z]+(-[a-z]+)*$")]
MOST_RUNS = 10**6
_FIX = "Compare it with examples/study.yaml"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Grid(_Strict):
    """Every combination of these. In place of noise multipliers it may name ε: σ is then calibrated to it, by RDP."""

    batch_size: Annotated[list[Whole], Field(min_length=1)]
    noise_multiplier: (
        Annotated[list[Annotated[float, Field(ge=0, allow_inf_nan=False)]], Field(min_length=1)] | None
    ) = None
    epsilon: Annotated[list[Positive], Field(min_length=1)] | None = None
    max_grad_norm: Annotated[list[Positive], Field(min_length=1)]

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.noise_multiplier is None) == (self.epsilon is None):
            raise ValueError("give exactly one of noise_multiplier and epsilon")
        return self


class Entry(_Strict):
    """A method with its learning rate and options; ``grid`` replaces the study's for this entry. ``tuned: false`` keeps the
    rate whatever was chosen: that is how a default stands beside the rate that tuning found."""

    method: str
    lr: Positive | list[Positive]
    tuned: bool = True
    options: dict[str, float | Name | list[float | Name]] = {}
    grid: Grid | None = None


class Shift(_Strict):
    """Every corruption at every severity."""

    corruptions: Annotated[tuple[str, ...], Field(min_length=1)]
    severities: Annotated[tuple[int, ...], Field(min_length=1)] = (1, 2, 3, 4, 5)


class Evaluate(_Strict):
    """What to look at beyond the test set: see :class:`dpivon.study.plan.plan.Evaluation`."""

    shift: Shift | None = None
    ood: tuple[str, ...] = ()
    selective: bool = False
    images: Whole | None = None

    def plain(self) -> Evaluation:
        return Evaluation(**self.model_dump(exclude={"shift"}), **(self.shift.model_dump() if self.shift else {}))


class Augment(_Strict):
    """Views of every drawn image: see :class:`dpivon.Augmentation`."""

    views: Whole
    flip: bool = False
    crop: Annotated[int, Field(ge=0)] = 0
    padding: Literal["reflect", "zeros"] = "reflect"

    def plain(self) -> Augmentation | None:
        return used(Augmentation(**self.model_dump()))


class Net(_Strict):
    """A network by its built-in name or import path, with its arguments."""

    name: str
    arguments: dict[str, JsonValue] = {}


#: Of a study, what its plan has as it stands.
_AS_IT_STANDS = {
    "name", "split", "epochs", "delta", "mc_samples", "temperature_noise", "seed", "assumptions", "classes",
}  # fmt: skip


class Study(_Strict):
    """The file."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    dataset: Data
    network: Annotated[Net, BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)]
    split: Literal["final", "tuning"] = "final"
    epochs: Whole
    seeds: Whole = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    delta: Annotated[float, Field(gt=0, lt=1)]
    mc_samples: Whole = 32
    temperature_noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    grid: Grid
    methods: Annotated[list[Entry], Field(min_length=1)]
    classes: tuple[Annotated[int, Field(ge=0, le=9)], ...] = ()
    evaluate: Evaluate | None = None
    augment: Augment | None = None
    assumptions: tuple[str, ...] = ()


def resolve(path: Path, lr: Path | None = None) -> Plan:
    """The plan that a YAML file stands for. ``lr`` is a file of chosen learning rates, which replace the entries'."""
    study = _parsed(path)
    own, net = planned(study.dataset, path.parent), study.network
    chosen = Rates() if lr is None else read_rates(lr)
    calibrated = _calibration(study, own)
    runs: list[PlannedRun] = []
    for entry in study.methods:
        known = set() if entry.tuned else {run.id for run in runs}  # what was chosen may be what stands beside it
        runs += [run for run in _runs(study, entry, chosen, calibrated) if run.id not in known]
    plan = Plan(
        **study.model_dump(include=_AS_IT_STANDS),
        dataset=study.dataset.path,
        network=net.name,
        runs=tuple(runs),
        evaluate=study.evaluate.plain() if study.evaluate else None,
        augment=study.augment.plain() if study.augment else None,
        arguments=net.arguments,
        data=own,
    )
    return replace(plan, architecture=architecture(plan))


def _parsed(path: Path) -> Study:
    raw = read_yaml("study", path, missing="Give one of examples/study.yaml", fix=_FIX)
    if isinstance(raw, dict) and "dataset" in raw:
        raw["dataset"] = declarations(raw["dataset"], path.parent)
    return validated(Study, raw, "study", fix=_FIX, place=str(path))


def _calibration(study: Study, own: OwnData | None) -> Callable[[int, float], float]:
    """σ by batch size and target ε, computed once each."""

    @functools.cache
    def sigma(batch_size: int, target: float) -> float:
        size = train_size(study.dataset.path, study.split, study.classes, own)
        terms: dict[str, Any] = {"epochs": study.epochs, "delta": study.delta, "target_epsilon": target}
        return rounded_up(budget(dataset_size=size, batch_size=batch_size, **terms).noise_multiplier)

    return sigma


def rounded_up(sigma: float, digits: int = 4) -> float:
    """To so many digits, never down: what a table can hold is then the σ that was used, and ε is not exceeded."""
    unit = 10.0 ** (math.floor(math.log10(sigma)) - digits + 1)
    return float(f"{math.ceil(sigma / unit - 1e-9) * unit:.{digits}g}")


def _runs(study: Study, entry: Entry, chosen: Rates, calibrated: Callable[[int, float], float]) -> Iterator[PlannedRun]:
    grid, seeds, rates = entry.grid or study.grid, range(study.seeds), _listed(entry.lr)
    options = {name: _listed(value) for name, value in entry.options.items()}
    noise = grid.noise_multiplier or grid.epsilon or []
    number = math.prod(map(len, (*options.values(), grid.batch_size, noise, grid.max_grad_norm, rates, seeds)))
    if number > MOST_RUNS:
        raise bad("seeds", study.seeds, f"makes {number} runs of {entry.method!r}", f"Plan at most {MOST_RUNS}")
    for *values, b in itertools.product(*options.values(), grid.batch_size):
        sigmas = grid.noise_multiplier or [calibrated(b, target) for target in noise]
        for sigma, c in itertools.product(sigmas, grid.max_grad_norm):
            rate = chosen.of(entry.method, b, sigma, c) if entry.tuned else None
            for lr, seed in itertools.product(rates if rate is None else [rate], seeds):
                yield PlannedRun(entry.method, b, sigma, c, seed, lr, dict(zip(options, values, strict=True)))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]
