"""A user's own data set in a study: arrays, a table with its schema, an image folder, or what a function returns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, JsonValue
from torch import Tensor

from dpivon.data.images import split_places
from dpivon.errors import bad
from dpivon.import_paths import called, imported, is_import_path
from dpivon.sources import Declaration, files_of, kind_of
from dpivon.sources.arrays import NAMES, Arrays, read_arrays
from dpivon.sources.columns import Labels
from dpivon.sources.schema import with_schema
from dpivon.study.plan.plan import DATASETS, OwnData
from dpivon.yaml_files import validated

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
