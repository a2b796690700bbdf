"""Studies as people write them: YAML, validated. A list in place of a number means all of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpivon.errors import bad
from dpivon.study.plan import Plan, PlannedRun

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=1, le=10**9)]
Name = Annotated[str, Field(pattern=r"^[a-z]+(-[a-z]+)*$")]
MOST_RUNS = 10**6
_FIX = "Compare it with studies/paper.yaml"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Grid(_Strict):
    """Every combination of these."""

    batch_size: Annotated[list[Whole], Field(min_length=1)]
    noise_multiplier: Annotated[list[Annotated[float, Field(ge=0, allow_inf_nan=False)]], Field(min_length=1)]
    max_grad_norm: Annotated[list[Positive], Field(min_length=1)]


class Entry(_Strict):
    """A method with its learning rate and options; ``grid`` replaces the study's for this entry."""

    method: str
    lr: Positive | list[Positive]
    options: dict[str, float | Name | list[float | Name]] = {}
    grid: Grid | None = None


class Study(_Strict):
    """The file."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    dataset: Literal["cifar10", "fashion-mnist", "digits"]
    network: Literal["paper", "small"]
    split: Literal["final", "tuning"] = "final"
    epochs: Whole
    seeds: Whole = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    delta: Annotated[float, Field(gt=0, lt=1)]
    mc_samples: Whole = 32
    temperature_noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    grid: Grid
    methods: Annotated[list[Entry], Field(min_length=1)]
    assumptions: list[str] = []


def resolve(path: Path, lr: Path | None = None) -> Plan:
    """The plan that a YAML file stands for. ``lr`` is a file of chosen learning rates, which replace the entries'."""
    study = _parsed(path)
    chosen = {} if lr is None else read_rates(lr)
    runs = [run for entry in study.methods for run in _runs(study, entry, chosen)]
    return Plan(
        name=study.name,
        dataset=study.dataset,
        network=study.network,
        split=study.split,
        epochs=study.epochs,
        delta=study.delta,
        mc_samples=study.mc_samples,
        temperature_noise=study.temperature_noise,
        seed=study.seed,
        runs=tuple(runs),
        assumptions=tuple(study.assumptions),
    )


def read_rates(path: Path) -> dict[str, float]:
    """Learning rates by method, as ``dpivon study pick`` writes them."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return {str(method): float(value) for method, value in raw["lr"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        fix = "Write it with `dpivon study pick`"
        raise bad("lr", str(path), f"is not a file of learning rates ({error})", fix) from None


def _parsed(path: Path) -> Study:
    import yaml

    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise bad("study", str(path), "does not exist", "Give one of studies/*.yaml") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise bad("study", str(path), f"is not YAML ({' '.join(str(error).split())})", _FIX) from None
    try:
        return Study.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "study"
        more = f" (and {error.error_count() - 1} more in {path})" if error.error_count() > 1 else f" (in {path})"
        raise bad(name, first["input"], first["msg"][0].lower() + first["msg"][1:] + more, _FIX) from None


def _runs(study: Study, entry: Entry, chosen: dict[str, float]) -> list[PlannedRun]:
    grid = entry.grid or study.grid
    rates: list[float] = [chosen[entry.method]] if entry.method in chosen else _listed(entry.lr)
    names = list(entry.options)
    axes = [_listed(value) for value in entry.options.values()]
    axes += [list(grid.batch_size), grid.noise_multiplier, grid.max_grad_norm, rates]
    number = study.seeds
    for axis in axes:
        number *= len(axis)
    if number > MOST_RUNS:
        raise bad("seeds", study.seeds, f"makes {number} runs of {entry.method!r}", f"Plan at most {MOST_RUNS}")
    out = []
    for options in itertools.product(*(_listed(entry.options[name]) for name in names)):
        cells = itertools.product(grid.batch_size, grid.noise_multiplier, grid.max_grad_norm, rates, range(study.seeds))
        for b, sigma, c, rate, seed in cells:
            out.append(PlannedRun(entry.method, b, sigma, c, seed, rate, dict(zip(names, options, strict=True))))
    return out


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]
