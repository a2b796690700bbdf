"""What a way to make forward passes is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor


class Passes(Protocol):
    """Logits of pictures that all rows see."""

    name: str
    at_once: int  # pictures that are best handed over together
    joins: bool  # whether they may be of several sets

    def logits(self, rows: Sequence[Tensor], pictures: Tensor) -> Iterable[Tensor]:
        """[n, classes] of every row of parameters in turn, for n normalised pictures."""
        ...
