"""Weights of layers in bf16: sums on tensor cores, clipped by norms that are bounded from above.

An example's gradient is H = Σ_t G_t ⊗ A_t of bf16 operands, and L = Σ_t ‖G_t‖‖A_t‖ ≥ ‖H‖. Neither its norm nor its part of the
sum is computed exactly: products of bf16 are exact in fp32, but adding up k of them may lose k·2⁻²⁴ of their absolute values,
and a weighted operand is rounded to two bf16 halves, 2⁻¹⁸ of it. Both errors are at most a small multiple of L. So

    N = (‖H‖²_computed + η₁ L²)^½ + η₂ L

is at least the norm of H, and at least that of what a factor of one adds to the sum. An example is clipped by N: where its
positions cancel, L is much larger than ‖H‖, and it counts for a little less than C.

    norms by Gram matrices   ‖H‖² = ⟨AAᵀ, GGᵀ⟩, products over at most _CHUNK columns: η₁ = (columns + …) 2⁻²⁴
    norms of made gradients  over T positions: part of η₂, T·2⁻²⁴
    the sum                  over T positions of an example, and the halves: η₂ = T·2⁻²⁴ + 2⁻¹⁸
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from dpivon.privacy.clipping import EXAMPLES_AT_ONCE
from dpivon.privacy.layers.made import Tied, _added_up
from dpivon.privacy.layers.uses import Outer, Rows, measured_in_parts, memory_cap
from dpivon.privacy.precision import product, wide

_UNIT = 2.0**-24  # of fp32, whichever way it rounds
_HALVES = 2.0**-18
_CHUNK = 1024  # columns of A or G over which a Gram matrix is added up at a time
_LEAST = 2.0**-126  # what fp32 may lose of a product of two small numbers
_VANISHES = 1e-34  # a weighted operand up to this counts as zero: its halves would be subnormal
_ALIGNED = 8  # bf16 numbers that tensor cores read at once


@dataclass(frozen=True)
class Bounded(Outer):
    """An :class:`~dpivon.privacy.layers.uses.Outer` of bf16 operands. Examples that were ``dropped`` contribute zero."""

    dropped: Tensor | None = None

    def squared_norm(self) -> Tensor:
        return _measured([self])[0]

    @staticmethod
    def measured(uses: Sequence[Bounded]) -> list[Tensor]:
        """The squared norms of several, in fewer launches."""
        return _measured(uses)

    def weighted_sum(self, c: Tensor) -> Tensor:
        a, g = self._aligned
        p, d = g.shape[2], a.shape[2]
        scaled, other = (a, g) if d <= p else (g, a)
        scaled = F.hardshrink(wide(scaled) * c.float().view(-1, 1, 1), _VANISHES)
        if self.dropped is not None:
            dropped = self.dropped.view(-1, 1, 1)
            scaled, other = scaled.masked_fill_(dropped, 0.0), other.masked_fill(dropped, 0.0)
        high = scaled.to(torch.bfloat16)
        halves = torch.cat([high, (scaled - high).to(torch.bfloat16)], 2)
        by_row = (d <= p) == self.transposed  # whether the rows of the result are those of the weighted operand
        total: Tensor | None = None
        for left, right in zip(halves.split(EXAMPLES_AT_ONCE), other.split(EXAMPLES_AT_ONCE), strict=True):
            left, right = left.flatten(0, 1).unsqueeze(0), right.flatten(0, 1).unsqueeze(0)
            both = product(left.mT, right)[0] if by_row else product(right.mT, left)[0]
            high, low = both.chunk(2, 0 if by_row else 1)
            part = torch.add(high.double(), low)
            total = part if total is None else total.add_(part)
        assert total is not None
        rows, columns = (self.a.shape[2], self.g.shape[2]) if self.transposed else (self.g.shape[2], self.a.shape[2])
        total = total[:rows, :columns].contiguous()
        return total.reshape(self.shape) if self.order is None else self.order.restore(total.flatten())

    @cached_property
    def _aligned(self) -> tuple[Tensor, Tensor]:
        """A and G with as many columns as tensor cores like."""
        a, g = (F.pad(t, (0, -t.shape[2] % _ALIGNED)) if t.shape[2] % _ALIGNED else t for t in (self.a, self.g))
        return a, g

    @property
    def by_grams(self) -> bool:
        """Whether Gram matrices are cheaper than gradients that are made; long examples would make their bound loose."""
        _, t, d = self.a.shape
        p = self.g.shape[2]
        return 2 * t * (p + d) < p * d

    @property
    def lengths(self) -> Tensor:
        """L of every example."""
        norms = (torch.linalg.vector_norm(t, dim=2, dtype=torch.float32).double() for t in (self.a, self.g))
        return torch.mul(*norms).sum(1)

    def _rows(self, examples: Tensor) -> Tensor:
        """As rows for their norms, with the columns that were added."""
        return self.some(examples).flatten(1)

    def some(self, examples: Tensor) -> Tensor:
        a, g = (t[examples] for t in self._aligned)
        return product(a.mT, g) if self.transposed else product(g.mT, a)

    def made(self) -> Tensor:
        a, g = (
            t if self.dropped is None else t.masked_fill(self.dropped.view(-1, 1, 1), 0.0) for t in (self.a, self.g)
        )
        return product(a.mT, g) if self.transposed else product(g.mT, a)

    def without(self, dropped: Tensor) -> Bounded:
        without = replace(self, dropped=dropped if self.dropped is None else dropped | self.dropped)
        if "_aligned" in vars(self):
            vars(without)["_aligned"] = self._aligned
        return without

    def grouped(self, rows: int) -> Bounded:
        a, g = (t.unflatten(0, (-1, rows)).flatten(1, 2) for t in (self.a, self.g))
        return replace(self, a=a, g=g)


@dataclass(frozen=True)
class BoundedTied(Tied):
    """A :class:`~dpivon.privacy.layers.made.Tied` whose head is in bf16: with E the embedding's gradient, and its L beside the
    head's, ‖H + E‖² = ‖H‖² + ‖E‖² + 2⟨H, E⟩, and ⟨H, E⟩ = Σ_st G_s[token t] ⟨A_s, E_t⟩ has no row of the table in it."""

    head: Bounded

    def squared_norm(self) -> Tensor:
        e, (_, t, d) = wide(self.table.g), self.head.a.shape
        lengths = torch.linalg.vector_norm(e, dim=2).sum(1, dtype=torch.float64)
        rounding = t + e.shape[1]
        if not self.head.by_grams:
            squares = measured_in_parts(self._rows, self.head._examples(), self.head.shape.numel())
            return upper_bound(squares, self.head.lengths + lengths, 0.0, 2 * rounding * _UNIT + _HALVES)
        squares, of_head, floor = (s[0] for s in _by_grams([self.head]))
        read = self.head.g.gather(2, self.table.index.unsqueeze(1).expand(-1, t, -1))
        cross = (torch.bmm(wide(self.head.a), e.mT) * read).sum((1, 2), dtype=torch.float64)
        squares = squares + self.table.squared_norm() + 2 * cross
        slack = (_columns(self.head) + d + rounding) * _UNIT
        return upper_bound(squares, of_head + lengths, slack, rounding * _UNIT + _HALVES, floor)

    def _rows(self, examples: Tensor) -> Tensor:
        made = self.head.some(examples)
        owners, places, rows = _added_up(self.table, examples)
        rows = F.pad(rows.to(made), (0, made.shape[2] - rows.shape[1]))
        made.flatten(0, 1).index_add_(0, owners * made.shape[1] + places, rows)
        return made.flatten(1)

    def weighted_sum(self, c: Tensor) -> Tensor:
        owners, places, rows = self.table._added
        weighted = rows.double() * c.double()[owners].unsqueeze(1)
        return self.head.weighted_sum(c).double().index_add_(0, places, weighted)


def upper_bound(squares: Tensor, lengths: Tensor, slack: float, rounding: float, floor: Tensor | float = 0.0) -> Tensor:
    """N² of the module's text, from ‖H‖², L, η₁, η₂ and what products of small numbers may have lost of ‖H‖²."""
    lengths = lengths.double() * 1.001  # more than it is rounded by
    n = (squares.double().clamp(min=0.0) * (1 + 1e-6) + floor + slack * lengths.square()).sqrt()
    return (n + rounding * lengths).square()


def _measured(uses: Sequence[Bounded]) -> list[Tensor]:
    """Those that need Gram matrices of one size together."""
    found: dict[int, Tensor] = {}
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, use in enumerate(uses):
        b, t, _ = use.a.shape
        if use.by_grams:
            alike.setdefault((b, t), []).append(i)
        else:
            squares = measured_in_parts(use._rows, use._examples(), use.shape.numel())
            found[i] = upper_bound(squares, use.lengths, 0.0, 2 * t * _UNIT + _HALVES)
    for (b, t), members in alike.items():
        room = max(1, memory_cap(uses[members[0]].a) // (8 * b * t * t))
        for start in range(0, len(members), room):
            some = members[start : start + room]
            outers = [uses[i] for i in some]
            squares, lengths, floor = _by_grams(outers)
            slack = max(_columns(use) for use in outers) * _UNIT
            bounds = upper_bound(squares, lengths, slack, t * _UNIT + _HALVES, floor)
            found |= zip(some, bounds, strict=True)
    return [found[i] for i in range(len(uses))]


def _columns(use: Bounded) -> int:
    """What adding up the two Gram matrices may lose, and multiplying them, in units of L² 2⁻²⁴."""
    widths = [t.shape[2] for t in (use.a, use.g)]
    return sum(min(n, _CHUNK) + -(-n // _CHUNK) for n in widths) + 2


def _by_grams(uses: Sequence[Bounded]) -> tuple[Tensor, Tensor, Tensor]:
    """‖H‖², L, and what underflow may have lost of ‖H‖², each [uses, examples]."""
    grams = [torch.stack([_gram(use._aligned[side]) for use in uses]) for side in (0, 1)]
    traces = [gram.diagonal(dim1=2, dim2=3).sum(2).double() for gram in grams]
    columns = max(use.g.shape[2] for use in uses), max(use.a.shape[2] for use in uses)
    floor = (traces[0] * columns[0] + traces[1] * columns[1]) * (grams[0].shape[2] * _LEAST)
    both = grams[0].mul_(grams[1])
    lengths = both.diagonal(dim1=2, dim2=3).sqrt().sum(2)
    return both.sum((2, 3), dtype=torch.float64), lengths, floor


def _gram(t: Tensor) -> Tensor:
    """t tᵀ of every example, over a few columns at a time."""
    total: Tensor | None = None
    for part in t.split(_CHUNK, 2):
        total = product(part, part.mT) if total is None else total.add_(product(part, part.mT))
    assert total is not None
    return total


def bounded(use: Outer) -> Bounded:
    return Bounded(use.a, use.g, use.shape, use.transposed, use.order)


def tied(head: Outer, table: Rows) -> Tied:
    return BoundedTied(head, table) if isinstance(head, Bounded) else Tied(head, table)
