"""Uses whose gradients are made a few examples at a time, once for their norms and once more for their sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpivon.privacy.layers.uses import Dense, Outer, Rows, Use, added_up_in_parts, measured_in_parts


@dataclass(frozen=True)
class Mapped:
    """g_i = M(Σ_t G_it ⊗ A_it), with M linear and the same for all examples.

    Each gradient is made and mapped by itself, for the norm and for the sum: M may take away most of a gradient, and would
    leave the rounding of a sum of them. ``copies`` tensors of a gradient's size are needed at once.
    """

    outer: Outer
    linear: Callable[[Tensor], Tensor]  # of [B, *shape]
    copies: int

    def squared_norm(self) -> Tensor:
        return measured_in_parts(self._rows, self.outer._examples(), self.copies * self.outer.shape.numel())

    def weighted_sum(self, c: Tensor) -> Tensor:
        size = self.copies * self.outer.shape.numel()
        return added_up_in_parts(self._rows, c, self.outer._examples(), size).reshape(self.outer.shape)

    def _rows(self, examples: Tensor) -> Tensor:
        some = replace(self.outer, a=self.outer.a[examples], g=self.outer.g[examples])
        return self.linear(some.materialise()).flatten(1)

    def materialise(self) -> Tensor:
        return self.linear(self.outer.materialise())

    def without(self, dropped: Tensor) -> Mapped:
        return replace(self, outer=self.outer.without(dropped))

    def grouped(self, rows: int) -> Mapped:
        return replace(self, outer=self.outer.grouped(rows))


def mapped(use: Use, linear: Callable[[Tensor], Tensor], copies: int) -> Use:
    """The use of which every gradient is ``linear`` of one of ``use``'s."""
    return Mapped(use, linear, copies) if isinstance(use, Outer) else Dense(linear(use.materialise()))


@dataclass(frozen=True)
class Tied:
    """A table that embeds tokens and is the head's weight too: g_i = Σ_t G_it ⊗ A_it, and an embedding's gradients in its rows.

    A row that an example looks up several times is added up before, so that what the sum is made of is, to the bit, what was
    measured.
    """

    head: Outer
    table: Rows

    def squared_norm(self) -> Tensor:
        return measured_in_parts(self._rows, self.head._examples(), self.head.shape.numel())

    def weighted_sum(self, c: Tensor) -> Tensor:
        shape = self.head.shape
        return added_up_in_parts(self._rows, c, self.head._examples(), shape.numel()).reshape(shape)

    def _rows(self, examples: Tensor) -> Tensor:
        made = replace(self.head, a=self.head.a[examples], g=self.head.g[examples]).made()
        owners, places, rows = _added_up(self.table, examples)
        index = owners * self.head.shape[0] + places
        return made.flatten(0, 1).index_add_(0, index, rows.to(made)).view(len(examples), -1)

    def materialise(self) -> Tensor:
        return self._rows(self.head._examples()).view(-1, *self.head.shape)

    def without(self, dropped: Tensor) -> Tied:
        return replace(self, head=self.head.without(dropped), table=self.table.without(dropped))

    def grouped(self, rows: int) -> Tied:
        return replace(self, head=self.head.grouped(rows), table=self.table.grouped(rows))


def _added_up(table: Rows, examples: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of some examples: whose, counted among them, which row of the table, and what is added to it, each pair once."""
    owners, places, rows = table._added
    count = torch.arange(len(examples), device=examples.device)
    if len(owners) == table.index.numel():  # one for every position
        places, rows = places.view(table.index.shape)[examples], rows.view(table.g.shape)[examples]
        return count.unsqueeze(1).expand_as(places).flatten(), places.flatten(), rows.flatten(0, 1)
    among = count.new_full((len(table.index),), -1).index_copy_(0, examples, count)[owners]
    mine = among >= 0
    return among[mine], places[mine], rows[mine]
