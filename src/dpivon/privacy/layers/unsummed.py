"""Gradients of biases and of normalisations that are added up over positions when backward is over, those of one size together.

A transformer has hundreds of such layers. On a GPU it takes longer to launch four operations for each of them than to copy
their operands side by side and to launch four for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dpivon.privacy.layers.uses import Dense, memory_cap, rows_of_an_example
from dpivon.privacy.precision import launches_cost, wide_dtype

COPIED = 64 * 2**20  # bytes of operands that are copied, to be measured and summed with others
#: How a layer normalises its input: a function of torch's, the shape that is normalised, and ε.
Normalise = tuple[Callable[..., Tensor], tuple[int, ...], float | None]


@dataclass(frozen=True)
class Unsummed:
    """g_i = Σ_t G_it of a bias; of a normalisation's weight Σ_t G_it ẑ_it, with ẑ its normalised input. Both are [B, T, …]."""

    g: Tensor
    x: Tensor | None = None
    normalise: Normalise | None = None

    def made(self) -> Tensor:
        if self.x is None or self.normalise is None:
            return self.g.sum(1, dtype=wide_dtype(self.g))
        function, shape, eps = self.normalise
        return function(self.x.to(self.g.dtype), shape, eps=eps).mul_(self.g).sum(1)

    @cached_property
    def _dense(self) -> Dense:
        return Dense(self.made())

    def unfolded(self) -> Dense:
        return self._dense

    def squared_norm(self) -> Tensor:
        return self._dense.squared_norm()

    def weighted_sum(self, c: Tensor) -> Tensor:
        return self._dense.weighted_sum(c)

    def materialise(self) -> Tensor:
        return self._dense.materialise()

    def without(self, dropped: Tensor) -> Dense:
        return self._dense.without(dropped)

    def grouped(self, rows: int) -> Dense:
        return self._dense.grouped(rows)


def left_unsummed(g: Tensor, x: Tensor | None = None, *, one_pass: bool = False) -> bool:
    """Whether to leave such a gradient until backward is over: where launches cost, and its operands are small. They are to be
    smaller where a kernel would read them in ``one_pass``."""
    size = g.nbytes if x is None else g.nbytes + x.nbytes
    most = COPIED // 4 if one_pass else COPIED
    return size <= most and rows_of_an_example() == 1 and launches_cost(g)


class Biases:
    """The biases among ``uses`` that are not added up yet. They are made in place."""

    def __init__(self, uses: list[Any]) -> None:
        self._uses = uses
        self._waiting: dict[int, list[int]] = {}  # by the output gradient
        for i, use in enumerate(uses):
            if type(use) is Unsummed and use.x is None:
                self._waiting.setdefault(id(use.g), []).append(i)

    def sum(self, gs: Sequence[Tensor], whole: Tensor) -> None:
        """Make those that wait for one of these output gradients, from ``whole``, which is all of them."""
        found = [(k, self._waiting.pop(id(g))) for k, g in enumerate(gs) if id(g) in self._waiting]
        if found:
            each = Unsummed(whole).made().unflatten(0, (len(gs), -1)).unbind()
            for k, places in found:
                for i in places:
                    self._uses[i] = Dense(each[k])

    def sum_rest(self) -> None:
        """Make those that nothing else was made with."""
        for places in self._waiting.values():
            for i in places:
                self._uses[i] = self._uses[i].unfolded()


def sum_normalisations(uses: list[Any], biases: Biases) -> None:
    """Make all weights of normalisations and their biases, those of one size together."""
    alike: dict[Any, list[int]] = {}
    for i, use in enumerate(uses):
        if type(use) is Unsummed and use.x is not None:
            alike.setdefault((use.normalise, use.g.shape, use.x.dtype, use.g.dtype), []).append(i)
    for members in alike.values():
        first = uses[members[0]].g
        size = 12 * first.numel()  # two operands in fp32, and what is computed of them
        at_once = max(1, memory_cap(first) // size)
        for start in range(0, len(members), at_once):
            some = members[start : start + at_once]
            gs, xs = [uses[i].g for i in some], [uses[i].x for i in some]
            g, x = (gs[0], xs[0]) if len(some) == 1 else (torch.cat(gs), torch.cat(xs))
            made = Unsummed(g, x, uses[some[0]].normalise).made().unflatten(0, (len(some), -1))
            for i, own in zip(some, made.unbind(), strict=True):
                uses[i] = Dense(own)
            biases.sum(gs, g)
