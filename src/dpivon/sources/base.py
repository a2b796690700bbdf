"""What every source of examples is, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpivon.errors import bad
from dpivon.sources.columns import Array, Strict, find

IMAGES = (".png", ".jpg", ".jpeg")
_KINDS = {".csv": "table", ".parquet": "table", ".npz": "array", ".npy": "array"} | dict.fromkeys(IMAGES, "image")


@dataclass(frozen=True, eq=False)
class Examples:
    """Encoded examples in the order of their file: float32 inputs, int64 targets if labels were asked for, and names.

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

    def read(self, where: str, classes: tuple[str, ...] | None) -> Examples:
        """The examples; with ``classes`` also their targets, an error if a label is not among them."""
        raise NotImplementedError

    def told(self) -> str:
        """What an example is, in words."""
        raise NotImplementedError

    def public(self) -> str:
        """What was declared of the examples, and so is public."""
        return f"Every example is {self.told()}."

    def not_chosen(self) -> list[str]:
        """Choices of preprocessing that usual pipelines make by looking at the rows, without noise."""
        return [
            "No mean, deviation or quantile of a column: values are clamped to the declared range and mapped to −1 to 1.",
            "No imputation from the data: a missing value is the middle of its range"
            + (", with an indicator of its own." if len(self.shape) == 1 else "."),
        ]

    def oddities(self, where: str) -> list[str]:
        """What of the data does not fit its declaration. For its owner's eyes: these counts are not private."""
        return []


def files_of(where: str) -> list[str]:
    """The one path, or the two of ``x.npy,y.npy``."""
    parts = where.split(",")
    return parts if len(parts) == 2 and all(part.endswith(".npy") for part in parts) else [where]


def kind_of(where: str, name: str = "data") -> str:
    """``image``, ``table`` or ``array``: by the name alone, before anything is read."""
    path = Path(files_of(where)[0])
    suffix = path.suffix.lower()
    if path.is_dir():
        return "image"
    if suffix not in _KINDS:
        fix = "Give a folder with one folder of PNG or JPEG per class, a .csv or .parquet table, or .npz or .npy arrays"
        raise bad(name, where, "is of no kind that is known", fix)
    if not path.exists():
        raise bad(name, where, "does not exist", "Check the path")
    return _KINDS[suffix]


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
    classes: tuple[str, ...] | None,
    ids: list[str] | None = None,
) -> Examples:
    """Examples that are rows of a file, numbered from 1."""
    if not len(encoded):
        raise no_examples(where)
    targets = None
    if classes is not None and labels is not None:
        found = (class_of(find(cell, classes), cell, f"row {i}", classes) for i, cell in enumerate(labels, start=1))
        targets = torch.from_numpy(np.fromiter(found, dtype=np.int64))
    inputs = torch.from_numpy(encoded.astype(np.float32))
    return Examples(inputs, targets, [str(i + 1) for i in range(len(encoded))], ids=ids)
