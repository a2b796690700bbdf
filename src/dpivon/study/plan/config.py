"""Studies as people write them: YAML, validated. A list in place of a number means all of them.

A data set is a built-in name, arrays, a table with its schema, an image folder, or what a function returns.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from torch import Tensor

from dpivon.data.images import split_places
from dpivon.errors import bad
from dpivon.import_paths import called, imported, is_import_path
from dpivon.privacy.accounting import budget
from dpivon.privacy.augmentation import Augmentation, used
from dpivon.sources import Declaration, files_of, kind_of
from dpivon.sources.arrays import NAMES, Arrays, read_arrays
from dpivon.sources.columns import Labels
from dpivon.sources.schema import with_schema
from dpivon.study.plan.data import architecture, train_size
from dpivon.study.plan.plan import DATASETS, OwnData, Plan, PlannedRun
from dpivon.study.results.tuning import Rates, read_rates
from dpivon.yaml_files import read_yaml, validated

Parts = tuple[Tensor, Tensor, Tensor, Tensor]  # inputs and labels to train on, inputs and labels of the test set
_KNOWN = f"Use {', '.join(DATASETS)}, a path (.npz, .csv, .parquet, a folder of images), or package.module:function"
_SPLIT = "Declare test_fraction, such as 0.2, or give a test set (x_test and y_test, or test: PATH)"


class Data(Declaration):
    """A study's ``dataset``: a built-in name, a path or an import path, with what is declared of it.

    ``dataset_size`` and ``classes`` are declared for tables and image folders, as for ``dpivon train``. Arrays and what a
    function returns are counted, as built-in data sets are.
    """

    path: str
    classes: Annotated[Labels, Field(min_length=2)] | None = None
    dataset_size: Annotated[int, Field(ge=1, le=10**9)] | None = None
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    test: str | None = None
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    split_seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


def declarations(value: Any, base: Path) -> Any:
    """What a study file says of its data set, with its schema; a text is a name or a path."""
    if isinstance(value, Mapping):
        return with_schema({str(name): declared for name, declared in value.items()}, base)
    return {"path": value} if isinstance(value, str) else value


def planned(data: Data, base: Path) -> OwnData | None:
    """The data set as a plan has it, paths being relative to ``base``; None for a built-in one."""
    if data.path in DATASETS:
        if data != Data(path=data.path):
            raise bad("dataset", data.path, "is built in, and nothing can be declared of it", "Give its name alone")
        return None
    if not is_import_path(data.path):
        if not Path(data.path).suffix and not (base / data.path).is_dir():
            raise bad("dataset", data.path, "is neither a built-in data set nor a path nor an import path", _KNOWN)
        places = {name: _each(getattr(data, name), lambda p: (base / p).absolute()) for name in ("path", "test")}
        data = data.model_copy(update=places)
    x, y, _, test_y = parts = _read(data, base)
    classes = len(data.classes) if data.classes else 1 + int(max(y.max(), test_y.max()))
    declared = data.model_dump(mode="json", exclude_defaults=True)
    return OwnData(declared, _digest(parts), len(y), classes, list(x.shape[1:]))


def load_own(own: OwnData, root: Path) -> Parts:
    """The examples that the study was planned on, from where they were or from the folder ``root``."""
    data = validated(Data, own.declared, "data", fix="Resolve the study again")
    parts = _read(data, root)
    if (found := _digest(parts)) != own.digest:
        problem = f"is not what the study was planned on (digest {found[:8]}, not {own.digest[:8]})"
        raise bad("dataset", data.path, problem, "Restore the data, or resolve the study again and give another --out")
    return parts


def _each(where: str | None, change: Callable[[str], Path | str]) -> str | None:
    return None if where is None else ",".join(str(change(part)) for part in files_of(where))


def _read(data: Data, root: Path) -> Parts:
    found = _found(data, root)
    x, y = _labelled(data, found, "")
    if data.dataset_size is not None and data.dataset_size != len(y):
        problem = f"{data.path} has {len(y)} examples"
        raise bad("dataset_size", data.dataset_size, problem, "Declare the number of examples of the whole file")
    if "x_test" not in found:
        held_out = int(len(y) * (data.test_fraction or 0))
        if not 0 < held_out < len(y):
            raise bad("test_fraction", data.test_fraction, f"leaves no test set of {len(y)} examples", _SPLIT)
        rest, test = (torch.from_numpy(places) for places in split_places(len(y), held_out, data.split_seed))
        return x[rest], y[rest], x[test], y[test]
    if data.test_fraction is not None:
        raise bad("test_fraction", data.test_fraction, f"but {data.path} has a test set", "Leave it out")
    test_x, test_y = _labelled(data, found, "_test")
    if (test_x.shape[1:], test_x.dtype) != (x.shape[1:], x.dtype):
        problem = f"has test examples of shape {tuple(test_x.shape[1:])}, and {tuple(x.shape[1:])} to train on"
        raise bad("dataset", data.path, problem, "Give both parts the same shape and type")
    return x, y, test_x, test_y


def _found(data: Data, root: Path) -> dict[str, Any]:
    """x and y, and x_test and y_test if there are, as the data has them."""
    function = is_import_path(data.path)
    # As planned, or in the folder of data of another machine.
    path, test = (_each(at, lambda p: p if Path(p).exists() else root / Path(p).name) for at in (data.path, data.test))
    assert path is not None
    if not function and kind_of(path, "dataset") != "array":
        return _declared(data, path, test)
    for name in ("columns", "target", "ignore", "id", "classes", "test"):
        if getattr(data, name):
            problem = "has no meaning for arrays: they are x, y, x_test and y_test, and y counts classes from 0"
            raise bad(name, getattr(data, name), problem, "Leave it out")
    if function:
        fix = "Name a function that returns x, y, x_test, y_test, or x, y with test_fraction declared"
        made = called("dataset", data.path, imported("dataset", data.path, fix), fix, data.arguments)
        if not isinstance(made, tuple) or len(made) not in (2, 4):
            raise bad("dataset", data.path, f"returned a {type(made).__name__}, not a tuple of two or four", fix)
        return dict(zip(NAMES, made, strict=False))
    found = read_arrays(path)
    if data.value_bounds is not None:
        for name in {"x", "x_test"} & found.keys():
            found[name] = Arrays(sizes=found[name].shape[1:], bounds=data.value_bounds).encode(found[name])
    return found


def _declared(data: Data, path: str, test: str | None) -> dict[str, Any]:
    """A table or a folder of images, read as ``dpivon train`` reads it."""
    for name in ("dataset_size", "classes"):
        if getattr(data, name) is None:
            problem = "is needed: it is never read off a table's rows or off images"
            raise bad(name, None, problem, f"Declare {name} beside the path, or classes in the schema")
    if data.target is not None and not isinstance(data.target, str):
        raise bad("target", data.target, "is several columns, and a study predicts classes", "Name one column")
    if test == path:
        raise bad("test", test, "is the training data", "Give other examples, or declare test_fraction")
    source = data.reader(path)
    parts = {"": source.read(path, data.classes)} | ({"_test": source.read(test, data.classes)} if test else {})
    return {f"{name}{end}": t for end, e in parts.items() for name, t in (("x", e.inputs), ("y", e.targets))}


def _labelled(data: Data, found: Mapping[str, Any], end: str) -> tuple[Tensor, Tensor]:
    """Inputs and labels as tensors: signed whole numbers stay whole (tokens of a text), all else is float32."""
    fix = f"Give x{end} as numbers, one row per example, and y{end} as one whole number from 0 per example"
    try:
        x, y = (torch.as_tensor(found[f"{name}{end}"]).cpu() for name in "xy")
        x = x.long() if x.dtype in (torch.int16, torch.int32, torch.int64) else x.float()
        if x.dim() < 2 or not len(x) or y.shape != (len(x),):
            raise ValueError(f"x{end} has shape {tuple(x.shape)}, and y{end} has {tuple(y.shape)}")
        if y.is_floating_point() or int(y.min()) < 0 or not bool(x.isfinite().all()):
            raise ValueError(f"x{end} is not finite, or y{end} is not of whole numbers from 0")
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise bad("dataset", data.path, f"cannot be used ({error})", fix) from None
    return x.contiguous(), y.long()


def _digest(parts: Parts) -> str:
    """Of the examples as they are trained on, so that it is the same for every way to store them."""
    found = hashlib.sha256()
    for part in parts:
        found.update(f"{part.dtype}{tuple(part.shape)}".encode() + part.numpy().tobytes())
    return found.hexdigest()


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
        terms["accountant"] = "rdp"  # the paper's
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
