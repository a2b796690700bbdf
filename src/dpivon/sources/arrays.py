"""NumPy arrays: an .npz with x and y, or two .npy as ``x.npy,y.npy``. Nothing is unpickled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from dpivon.bounds import Bounds
from dpivon.errors import bad
from dpivon.sources.base import Examples, Source, Targets, files_of, rows
from dpivon.sources.columns import Array, Numeric, scaled
from dpivon.sources.owner import Finding

NAMES = ("x", "y", "x_test", "y_test")  # of arrays in an .npz; the last two only studies read
_ALSO = {"data": "x", "X": "x", "features": "x", "labels": "y", "target": "y", "targets": "y"}
_KINDS = "biuf"  # bool, int, unsigned, float


class Arrays(Source):
    """Numbers clamped to a declared range and mapped to [−1, 1]. NaN is the middle; flat rows get an indicator of it each.

    ``sizes`` is the shape of one example: [features], [height, width], or [channels, height, width].
    """

    kind: Literal["array"] = "array"
    sizes: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, max_length=3)]
    bounds: Numeric

    @property
    def shape(self) -> tuple[int, ...]:
        if len(self.sizes) == 1:
            return (2 * self.sizes[0],)
        return self.sizes if len(self.sizes) == 3 else (1, *self.sizes)

    def describe(self) -> str:
        return f"an array of {' × '.join(map(str, self.sizes))}"

    def public(self) -> str:
        return f"Every example is {self.describe()}, of values from {self.bounds.describe()}."

    def read(self, where: str, targets: Targets | None) -> Examples:
        x, y = _arrays(where, labels=targets is not None)
        if x.shape[1:] != self.sizes:
            problem = f"holds examples of shape {x.shape[1:]}, and {self.sizes} is declared"
            raise bad("data", where, problem, "Give arrays of the declared shape")
        if y is not None and y.shape != (len(x),):
            raise bad("data", where, f"has labels of shape {y.shape} for {len(x)} examples", "Give one label each")
        return rows(where, self.encode(x), None if y is None else y.tolist(), targets)

    def look(self, where: str, *, learning: bool = True) -> list[Finding]:
        values = _arrays(where, labels=False)[0].astype(np.float64)
        outside, n = int(((values < self.bounds.min) | (values > self.bounds.max)).sum()), values.size
        line = f"values: {outside} clamped, {int(np.isnan(values).sum())} missing, of {n}"
        problem = f"{outside} of {n} values are outside {self.bounds.describe()}" if outside > n / 2 else ""
        return [Finding(line, problem)]

    def encode(self, x: Array) -> Array:
        values, missing = scaled(x.astype(np.float64), Bounds.check("bounds", (self.bounds.min, self.bounds.max), 1))
        return np.concatenate([values, missing], axis=1) if len(self.sizes) == 1 else values.reshape(-1, *self.shape)


def example_shape(where: str) -> tuple[int, ...]:
    """The shape of one example. Adding or removing an example does not change it, so it is public."""
    x, _ = _arrays(where, labels=False)
    if not 2 <= x.ndim <= 4:
        fix = "Let it be [n, features], [n, height, width] or [n, channels, height, width]"
        raise bad("data", where, f"x has shape {x.shape}", fix)
    return tuple(x.shape[1:])


def _arrays(where: str, labels: bool) -> tuple[Array, Array | None]:
    found = read_arrays(where, ("x", "y") if labels else ("x",))
    x, y = found["x"], found.get("y") if labels else None
    if x.dtype.kind not in _KINDS:
        raise bad("data", where, f"x is of type {x.dtype}, not of numbers", "Convert x to numbers")
    if y is not None and y.dtype.kind not in f"{_KINDS}US":
        raise bad("data", where, f"y is of type {y.dtype}, neither numbers nor texts", "Convert y to numbers or texts")
    return x, y


def read_arrays(where: str, needed: tuple[str, ...] = ("x", "y")) -> dict[str, Array]:
    """The arrays x, y, x_test and y_test by name, as far as they are there."""
    parts = [Path(part) for part in files_of(where)]
    if parts[0].suffix.lower() == ".npz":
        found = {name: array for name, array in _load(parts[0]).items() if name in NAMES}
    else:
        found = {name: _load(part)[""] for name, part in zip("xy", parts, strict=False)}
    for name in needed:
        if name not in found:
            there = ", ".join(map(repr, _load(parts[0]))) if parts[0].suffix.lower() == ".npz" else "one array"
            problem = f"holds no {name}, but {there or 'nothing'}"
            fix = "Give an .npz with x and y (or data and labels), or x.npy,y.npy"
            raise bad("data", where, problem, fix)
    return found


def _load(path: Path) -> dict[str, Array]:
    """The arrays of an .npz by name, or the one array of an .npy under the name ""."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"": loaded}
        with loaded:
            names = {name: name for name in loaded.files}
            for other, own in _ALSO.items():  # as other libraries call them
                if other in names and own not in names:
                    names[own] = names.pop(other)
            return {name: loaded[key] if name in NAMES else np.empty(0) for name, key in names.items()}
    except Exception as error:  # a damaged archive or header raises one of a dozen kinds
        fix = "Write it with numpy.savez or save"
        raise bad("data", str(path), f"cannot be read as arrays ({error})", fix) from None
