"""What every source of examples is, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpivon.errors import bad
from dpivon.sources.columns import Array, Numeric, Strict, find, is_missing
from dpivon.sources.owner import Finding

IMAGES = (".png", ".jpg", ".jpeg")
Targets = tuple[str, ...] | Numeric  # the classes, or the range of a number to predict
_TABLES = (".csv", ".parquet")
_KINDS = {".csv": "table", ".parquet": "table", ".npz": "array", ".npy": "array"} | dict.fromkeys(IMAGES, "image")


@dataclass(frozen=True, eq=False)
class Examples:
    """Encoded examples in the order of their file: float32 inputs, names, and targets if they were asked for.

    Targets are int64 places among the classes, or float32 values of a declared range mapped to [−1, 1]; of several columns
    float32 [n, columns], 1 where the second of the two classes is.

    A table's ``ids`` are the texts of its declared id column, as they are in the file: "" where one is missing.
    """

    inputs: Tensor
    targets: Tensor | None
    names: list[str]
    images: Array | None = None  # uint8 [n, height, width, 3], of images
    ids: list[str] | None = None

    def __len__(self) -> int:
        return len(self.inputs)


class Source(Strict):
    """How to read and encode examples, as public facts: written into ``model.json``, so that prediction does the same."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one encoded example."""
        raise NotImplementedError

    def read(self, where: str, targets: Targets | None) -> Examples:
        """The examples; with ``targets`` also theirs, an error if a label is missing or not as declared."""
        raise NotImplementedError

    def describe(self) -> str:
        """What an example is, in words."""
        raise NotImplementedError

    def public(self) -> str:
        """What was declared of the examples, and so is public."""
        return f"Every example is {self.describe()}."

    def not_chosen(self) -> list[str]:
        """Choices of preprocessing that usual pipelines make by looking at the rows, without noise."""
        return [
            "No mean, deviation or quantile of a column: values are clamped to the declared range and mapped to −1 to 1.",
            "No imputation from the data: a missing value is the middle of its range"
            + (", with an indicator of its own." if len(self.shape) == 1 else "."),
        ]

    def look(self, where: str, *, learning: bool = True) -> list[Finding]:
        """What of the data does not look as declared. For its owner's eyes: these counts are not private."""
        return []


def files_of(where: str) -> list[str]:
    """The files of ``where``: one, the two of ``x.npy,y.npy``, or tables by commas or by a pattern such as ``part-*.csv``."""
    parts = where.split(",")
    if Path(where).exists():
        return [where]
    if len(parts) == 2 and all(part.endswith(".npy") for part in parts):
        return parts
    if not all(part.lower().endswith(_TABLES) for part in parts):
        return [where]
    found = [path for part in parts for path in (sorted(glob(part)) or [part])]
    if len({Path(path).resolve() for path in found}) < len(found):
        raise bad("data", where, "names a file twice, and its rows would count twice", "Name every file once")
    return found


def kind_of(where: str, name: str = "data") -> str:
    """``image``, ``table`` or ``array``: by the name alone, before anything is read."""
    paths = [Path(path) for path in files_of(where)]
    if paths[0].is_dir():
        return "image"
    for path in paths:
        if path.suffix.lower() not in _KINDS:
            fix = "Give a folder with one folder of PNG or JPEG per class, a .csv or .parquet table, or .npz or .npy arrays"
            raise bad(name, where, "is of no kind that is known", fix)
        if not path.exists():
            raise bad(name, str(path), "does not exist", "Check the path")
    return _KINDS[paths[0].suffix.lower()]


def no_examples(where: str) -> Exception:
    return bad("data", where, "holds no examples", "Check the path")


def class_of(found: int | None, cell: object, place: str, classes: tuple[str, ...]) -> int:
    """The class of a label, or an error to the owner of the data, before step 0: nothing was released."""
    if found is None:
        problem = f"the label {cell!r} of {place} is not among them"
        raise bad("classes", ", ".join(classes), problem, "Declare every class that may occur, or remove the row")
    return found


def rows(
    where: str,
    encoded: Array,
    labels: Sequence[object] | None,
    targets: Targets | None,
    ids: list[str] | None = None,
) -> Examples:
    """Examples that are rows of a file, numbered from 1."""
    if not len(encoded):
        raise no_examples(where)
    found = None if targets is None or labels is None else torch.from_numpy(target_values(where, labels, targets))
    inputs = torch.from_numpy(encoded.astype(np.float32))
    return Examples(inputs, found, [str(i + 1) for i in range(len(encoded))], ids=ids)


def target_values(where: str, labels: Sequence[object], declared: Targets) -> Array:
    """The places of labels among the declared classes, or numbers on [−1, 1]."""
    if isinstance(declared, Numeric):
        encoded = declared.encode(labels)
        unread = np.flatnonzero(encoded[:, 1])
        if len(unread):
            problem = (
                f"{len(unread)} of {len(labels)} targets are missing or no numbers, the first in row {unread[0] + 1}"
            )
            raise bad("data", where, problem, "Remove these rows, or correct them")
        return encoded[:, 0].astype(np.float32)
    missing = [i for i, cell in enumerate(labels, start=1) if is_missing(cell) and find(cell, declared) is None]
    if missing:
        problem = f"{len(missing)} of {len(labels)} labels are missing, the first in row {missing[0]}"
        raise bad("data", where, problem, "Remove these rows, or declare a class for them")
    found = (class_of(find(cell, declared), cell, f"row {i}", declared) for i, cell in enumerate(labels, start=1))
    return np.fromiter(found, dtype=np.int64)
