"""A whole run of `dpivon train` on a made-up table, and runs that die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dpivon.train import load
from dpivon.train.run import Watcher

slow = pytest.mark.slow


class Dies(Watcher):
    """A process that is killed after so many steps: nothing is saved."""

    def __init__(self, after: int) -> None:
        self.after = after

    def begin(self, config: Any, description: Any, loop: Any) -> Any:
        def show(line: Any, step: int) -> None:
            if line is None and step == self.after:
                raise MemoryError("killed")

        return show


def posterior(folder: str | Path) -> dict[str, torch.Tensor]:
    q = load(Path(folder)).posterior
    return {**{f"m {k}": v for k, v in q.mean.items()}, **{f"v {k}": v for k, v in q.variance.items()}}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
