"""The biases of layers over several positions: g_i = Σ_t G_it.

Where kernels take the weight's norms and sums, G is kept until backward is over and lies in memory by then, because a product
has read it. There the biases wait for that, and a recorded program adds them all up by one operator, side by side
(:mod:`dpivon.privacy.kernels.position_ops`): it reads what is stored, in fp32, and what it writes is measured and summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from dpivon.privacy.kernels.position_ops import position_sums
from dpivon.privacy.layers.convolved import Convolved
from dpivon.privacy.layers.uses import Dense, Use
from dpivon.privacy.precision import capturing, wide_dtype


def summed(g: Tensor, weight: Use | None) -> Use:
    """The use of a bias, of g [B, T, p]; ``weight`` is that of its layer's weight, if it has one."""
    waits = capturing() and isinstance(weight, Convolved)
    return Summed(g) if waits else Dense(g.sum(1, dtype=wide_dtype(g)))


@dataclass(frozen=True)
class Summed:
    """Gradients that are not added up yet. ``g`` is [B, T, p]."""

    g: Tensor

    @cached_property
    def _made(self) -> Dense:
        return one_matrix([self])

    def squared_norm(self) -> Tensor:
        return self._made.squared_norm()

    def weighted_sum(self, c: Tensor) -> Tensor:
        return self._made.weighted_sum(c)

    def materialise(self) -> Tensor:
        return self._made.materialise()

    def unfolded(self) -> Dense:
        return self._made

    def without(self, struck: Tensor) -> Dense:
        return self._made.without(struck)

    def grouped(self, rows: int) -> Summed:
        return Summed(self.g.unflatten(0, (-1, rows)).flatten(1, 2))


def one_matrix(biases: Sequence[Summed]) -> Dense:
    """All of them side by side."""
    return Dense(position_sums([bias.g for bias in biases], False))
