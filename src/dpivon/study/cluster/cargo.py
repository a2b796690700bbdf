"""What workers need of the data, as arrays: Ray keeps them once a machine, in memory that its workers share and only read."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpivon.study.plan.data import StudyData
from dpivon.study.run.robustness import Condition

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Cargo:
    """The data, and the conditions that runs are evaluated under: made by the driver, so that no worker needs its files."""

    data: tuple[Array, ...]
    conditions: tuple[tuple[str, str, int, Array, Array | None], ...]

    @property
    def bytes(self) -> int:
        return sum(a.nbytes for a in (*self.data, *(c[3] for c in self.conditions)))

    @property
    def examples(self) -> int:
        return len(self.data[0])

    def unpack(self, device: torch.device) -> tuple[StudyData, list[Condition]]:
        """What was packed, on a device."""
        data = StudyData(*(_tensor(a).to(device) for a in self.data))
        conditions = [
            Condition(kind, name, severity, _tensor(images).to(device), None if y is None else _tensor(y).to(device))
            for kind, name, severity, images, y in self.conditions
        ]
        return data, conditions


def pack(data: StudyData, conditions: Sequence[Condition]) -> Cargo:
    return Cargo(
        tuple(t.numpy() for t in (data.images, data.labels, data.eval_images, data.eval_labels)),
        tuple(
            (c.kind, c.name, c.severity, c.images.numpy(), None if c.labels is None else c.labels.numpy())
            for c in conditions
        ),
    )


def _tensor(array: Array) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)  # it is only read
        return torch.from_numpy(array)
