"""Where examples come from: a table, a folder of images, or arrays; one kind a file.

A source is declared by public facts and written into the published ``model.json``, so that prediction reads and encodes
exactly as training did.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from dpivon.errors import bad
from dpivon.train.columns import Array


@dataclass(frozen=True, eq=False)
class Examples:
    """Encoded examples in the order of their file: float32 inputs, int64 targets if labels were asked for, and names."""

    inputs: Tensor
    targets: Tensor | None
    names: list[str]
    pictures: Array | None = None  # uint8 [n, height, width, 3], of images

    def __len__(self) -> int:
        return len(self.inputs)


class Source(Protocol):
    """What all of them do. ``shape`` is that of one encoded example."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, where: str, classes: tuple[str, ...] | None) -> Examples:
        """The examples; with ``classes`` also their targets, an error if a label is not among them."""

    def told(self) -> str:
        """What an example is, in words."""


def files_of(where: str) -> list[str]:
    """The one path, or the two of ``x.npy,y.npy``."""
    parts = where.split(",")
    return parts if len(parts) == 2 and all(part.endswith(".npy") for part in parts) else [where]


def kind_of(where: str, name: str = "data") -> str:
    """``image``, ``table`` or ``array``: by the name alone, before anything is read."""
    path = Path(files_of(where)[0])
    if path.is_dir():
        return "image"
    kinds = {".csv": "table", ".parquet": "table", ".npz": "array", ".npy": "array"}
    if path.suffix.lower() in (".png", ".jpg", ".jpeg"):
        return "image"
    if path.suffix.lower() not in kinds:
        fix = "Give a folder with a folder of PNG or JPEG a class, a .csv or .parquet table, or .npz or .npy arrays"
        raise bad(name, where, "is of no kind that is known", fix)
    if not path.exists():
        raise bad(name, where, "does not exist", "Check the path")
    return kinds[path.suffix.lower()]


def no_examples(where: str) -> Exception:
    return bad("data", where, "holds no examples", "Check the path")


def index_of(found: int | None, cell: object, place: str, classes: tuple[str, ...]) -> int:
    """The class of a label, or an error to the owner of the data, before step 0: nothing was released."""
    if found is None:
        raise bad(
            "classes",
            ", ".join(classes),
            f"the label {cell!r} of {place} is not among them",
            "Declare every class that may occur, or remove the row",
        )
    return found


def targets(labels: list[int]) -> Tensor:
    from torch import from_numpy

    return from_numpy(np.array(labels, dtype=np.int64))
