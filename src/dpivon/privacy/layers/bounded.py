"""Weights of layers in bf16: sums on tensor cores, clipped by norms that are bounded from above.

An example's gradient is H = Σ_t G_t ⊗ A_t of bf16 operands, and L = Σ_t ‖G_t‖‖A_t‖ ≥ ‖H‖. Neither its norm nor its part of the
sum is exact: products of bf16 are exact in fp32, but adding up k of them may lose k·u of their absolute values (u = 2⁻²³, as
tensor cores cut off), and a weighted operand is rounded to two bf16 halves, 2⁻¹⁸ of it. Both errors are at most a small
multiple of L. An example is clipped by N = ‖H‖₊ + ηL, at least the norm of what a factor of one adds to the sum: where its
positions cancel, L is much larger than ‖H‖, and it counts for less than C.

    the sum        over T positions of an example, and the halves: η = T·u + 2⁻¹⁸
    made norms     ‖H‖₊ is computed from H, made over T positions: η is larger by T·u
    Gram matrices  ‖H‖² = ⟨K, J⟩ with K = AAᵀ and J = GGᵀ, over at most k columns at a time. K_st is off by at most
                   ku‖A_s‖‖A_t‖, so ‖H‖₊² = ⟨K, J⟩ + ku Σ_st (‖A_s‖‖A_t‖|J_st| + ‖G_s‖‖G_t‖|K_st|) + O(u L²).
                   Computed in fp32, ⟨K, J⟩ is off by uL² and the sum over st by Tu of itself; for that 2uL² and 1 % of the
                   sum are added. A kernel that adds up in double is off by less: next to nothing of ⟨K, J⟩, 4u of the sum.

Where the positions of A share an offset, K is large everywhere, and N exceeds ‖H‖ by more the longer an example is: by 3 % at
500 positions of a weight of 1024 x 1024 and an offset of 3σ, where N from made gradients exceeds it by .3 %. Where G cancels
over the positions too, these are 26 % and .9 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from dpivon.privacy.clipping import EXAMPLES_AT_ONCE, row_norms
from dpivon.privacy.kernels import conv_ops
from dpivon.privacy.layers.made import Tied, _added_up
from dpivon.privacy.layers.unsummed import COPIED
from dpivon.privacy.layers.uses import Outer, Rows, memory_cap, rows_of_an_example
from dpivon.privacy.precision import ALIGNED, capturing, launches_cost, padded, product, wide

MADE_BYTES = 16 * 2**20  # of gradients from bf16 that are made and kept,
MADE_RATIO = 3  # or so many times what their operands take
_WIDE = 2**18  # elements of a weight whose norms a recorded program bounds
_UNIT = 2.0**-23  # of fp32, whichever way it rounds
_HALVES = 2.0**-18
_CHUNK = 1536  # columns of A or G over which a Gram matrix is added up at a time,
_CHUNKS = 16  # or more, where there would be more of them than this
_LEAST = 2.0**-126  # what fp32 may lose of a product of two small numbers


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
        total = self.weighted_sums(c, 1)
        return total.reshape(self.shape) if self.order is None else self.order.restore(total.flatten())

    def weighted_sums(self, c: Tensor, uses: int) -> Tensor:
        """Of the examples of so many uses, one after the other: the sum of each, [uses, rows, columns]."""
        a, g = self._aligned
        scaled, other = (a, g) if a.shape[2] <= g.shape[2] else (g, a)
        if self.dropped is not None:
            c, other = c.masked_fill(self.dropped, 0.0), _finite(other)
        by_row = (
            a.shape[2] <= g.shape[2]
        ) == self.transposed  # whether the rows of the result are those of what is weighted
        (_, t, n), across = other.shape, 1 if by_row else 2
        halves, other = _halves(scaled, c).view(uses, -1, 2 * scaled.shape[2]), other.reshape(uses, -1, n)
        parts: Any = [(halves, other)]
        if len(a) > uses * EXAMPLES_AT_ONCE:
            parts = zip(*(x.split(EXAMPLES_AT_ONCE * t, 1) for x in (halves, other)), strict=True)
        total: Tensor | None = None
        for left, right in parts:
            part = _sum_of_halves(product(left.mT, right) if by_row else product(right.mT, left), across)
            total = part if total is None else total.add_(part)
        assert total is not None
        if a.shape != self.a.shape or g.shape != self.g.shape:
            size = self.g.shape[2], self.a.shape[2]
            rows, columns = reversed(size) if self.transposed else size
            total = total[:, :rows, :columns].contiguous()
        return total

    @cached_property
    def _aligned(self) -> tuple[Tensor, Tensor]:
        """A and G with as many columns as tensor cores like."""
        a, g = (padded(t) if t.shape[2] % ALIGNED else t for t in (self.a, self.g))
        return a, g

    @property
    def by_grams(self) -> bool:
        """Whether Gram matrices take fewer operations than gradients that are made. They also take less memory."""
        _, t, d = self.a.shape
        p = self.g.shape[2]
        return t * (p + d) < p * d

    @property
    def lengths(self) -> Tensor:
        """L of every example."""
        norms = (torch.linalg.vector_norm(t, dim=2, dtype=torch.float32).double() for t in (self.a, self.g))
        return torch.mul(*norms).sum(1)

    def squares_of_made(self, added: Callable[[Tensor, Tensor], None] = lambda made, examples: None) -> Tensor:
        """‖H‖² from gradients that are made a few examples at a time, to which ``added`` adds others in place."""
        at_once, found = max(1, memory_cap(self.a) // (4 * self.shape.numel())), []
        for a, g, examples in zip(*(t.split(at_once) for t in (*self._aligned, self._examples())), strict=True):
            made = product(a.mT, g) if self.transposed else product(g.mT, a)
            added(made, examples)
            found.append(row_norms(made.flatten(1)))
        return torch.cat(found).square()

    def made(self) -> Tensor:
        a, g = (t if self.dropped is None else _without(t, self.dropped) for t in (self.a, self.g))
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
class Together:
    """Several :class:`Bounded` of one size, the examples of one after those of the other. They are clipped by one factor."""

    whole: Bounded
    uses: int

    @classmethod
    def of(cls, uses: Sequence[Bounded]) -> Together:
        a, g = torch.cat([use.a for use in uses]), torch.cat([use.g for use in uses])
        return cls(replace(uses[0], a=a, g=g), len(uses))

    def squared_norm(self) -> Tensor:
        return self.measured([self])[0]

    @staticmethod
    def measured(several: Sequence[Together]) -> list[Tensor]:
        """The squared norms of several, in fewer launches."""
        found = _measured([some.whole for some in several])
        return [squares.view(some.uses, -1).sum(0) for some, squares in zip(several, found, strict=True)]

    def weighted_sum(self, c: Tensor) -> Tensor:
        return self.whole.weighted_sums(c.repeat(self.uses), self.uses).flatten()

    def without(self, dropped: Tensor) -> Together:
        return replace(self, whole=self.whole.without(dropped.repeat(self.uses)))


def together(uses: Sequence[object]) -> list[list[int]]:
    """Which are small and alike, so that a copy of their operands takes less than launching for each, in groups that fit."""
    alike: dict[object, list[int]] = {}
    bounded = [(i, use) for i, use in enumerate(uses) if type(use) is Bounded and use.order is None]
    for i, use in bounded if bounded and launches_cost(bounded[0][1].g) else ():
        if use.a.shape[0] <= EXAMPLES_AT_ONCE and use.a.nbytes + use.g.nbytes <= COPIED:
            alike.setdefault((use.a.shape, use.g.shape, use.transposed), []).append(i)
    found = []
    for members in alike.values():
        first: Bounded = uses[members[0]]  # type: ignore[assignment]
        b, t, _ = first.a.shape
        parts = -(-len(members) * (16 * first.shape.numel() + 8 * b * t * t) // memory_cap(first.a))
        size = -(-len(members) // parts)
        found += [members[start : start + size] for start in range(0, len(members), size)]
    return [members for members in found if len(members) > 1]


class Unmade(Outer):
    """Small gradients that are made when backward is over, with others of their size (``gradients/side_by_side``)."""


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
            squares = self.head.squares_of_made(self._add_embedded)
            return upper_bound(squares, self.head.lengths + lengths, 2 * rounding * _UNIT + _HALVES)
        squares, of_head = _by_grams([self.head])
        read = self.head.g.gather(2, self.table.index.unsqueeze(1).expand(-1, t, -1))
        cross = (torch.bmm(wide(self.head.a), e.mT) * read).sum((1, 2), dtype=torch.float64)
        lost = (d + rounding) * _UNIT * (2 * of_head + lengths) * lengths
        squares = squares + self.table.squared_norm() + 2 * cross + 1.01 * lost
        return upper_bound(squares, of_head + lengths, rounding * _UNIT + _HALVES)

    def _add_embedded(self, made: Tensor, examples: Tensor) -> None:
        owners, places, rows = _added_up(self.table, examples)
        rows = F.pad(rows.to(made), (0, made.shape[2] - rows.shape[1]))
        made.flatten(0, 1).index_add_(0, owners * made.shape[1] + places, rows)

    def weighted_sum(self, c: Tensor) -> Tensor:
        owners, places, rows = self.table._added
        weighted = rows.double() * c.double()[owners].unsqueeze(1)
        return self.head.weighted_sum(c).double().index_add_(0, places, weighted)


def upper_bound(squares: Tensor, lengths: Tensor, rounding: float) -> Tensor:
    """N² of the module's text, from ‖H‖², L and η."""
    n = (squares.double().clamp(min=0.0) * (1 + 1e-6)).sqrt()
    return n.add_(lengths.double(), alpha=1.001 * rounding).square()


def _measured(uses: Sequence[Bounded]) -> list[Tensor]:
    """Those that need Gram matrices of one size, and lose as much, together."""
    found: dict[int, Tensor] = {}
    alike: dict[tuple[int, float, float], list[int]] = {}
    for i, use in enumerate(uses):
        t = use.a.shape[1]
        if use.by_grams:
            alike.setdefault((t, _loss(use.a.shape[2]), _loss(use.g.shape[2])), []).append(i)
        else:
            squares = use.squares_of_made()
            found[i] = upper_bound(squares, use.lengths, 2 * t * _UNIT + _HALVES)
    for (t, _, _), members in alike.items():
        room = memory_cap(uses[members[0]].a) // (8 * t * t)  # examples
        while members:
            sizes = [len(uses[i].a) for i in members]
            count = max(1, sum(total <= room for total in accumulate(sizes)))
            some, members = members[:count], members[count:]
            bounds = upper_bound(*_by_grams([uses[i] for i in some]), t * _UNIT + _HALVES)
            found |= zip(some, bounds.split(sizes[:count]), strict=True)
    return [found[i] for i in range(len(uses))]


def bounds_pay(a: Tensor, g: Tensor) -> bool:
    """Whether a recorded program bounds norms from above, of a large weight over so few positions that Gram matrices take at
    most half of the operations."""
    (_, t, d), p = a.shape, g.shape[2]
    return a.dtype == g.dtype == torch.bfloat16 and p * d >= _WIDE and 2 * t * (p + d) < p * d and capturing()


@torch.library.custom_op("dpivon::gram_bounds", mutates_args=(), schema="(Tensor[] xs, Tensor[] gs) -> Tensor")
def gram_bounds(xs: list[Tensor], gs: list[Tensor]) -> Tensor:
    """N² of the module's text, [layers, examples], of linear layers as images of one column, [B, channels, T, 1].

    An operator, since a compiler takes minutes for these hundreds of small operations, and finds little to join.
    """
    each = [(x.squeeze(3).mT, g.squeeze(3).mT) for x, g in zip(xs, gs, strict=True)]
    return torch.stack(_measured([Bounded(a, g, torch.Size((g.shape[2], a.shape[2]))) for a, g in each]))


@gram_bounds.register_fake
def _(xs: list[Tensor], gs: list[Tensor]) -> Tensor:
    return xs[0].new_empty(len(xs), len(xs[0]), dtype=torch.float64)


def _by_kernels(t: Tensor) -> bool:
    """Whether our kernels read it: on a GPU that has them, unless operations are being recorded."""
    return launches_cost(t) and conv_ops.enabled and conv_ops.device_takes(t.device)


def _halves(t: Tensor, c: Tensor) -> Tensor:
    """c_i t_i as two bf16 numbers that add up to it, side by side; zero where c is, whatever t holds."""
    c, n = c.float(), t.shape[2]
    if _by_kernels(t):
        return conv_ops.weighted_halves(t, c)
    weighted = _finite(t) * c.view(-1, 1, 1)
    halves = t.new_empty(*t.shape[:2], 2 * n)
    high = halves[..., :n].copy_(weighted)
    torch.sub(weighted, high, out=halves[..., n:])
    return halves


def _sum_of_halves(both: Tensor, across: int) -> Tensor:
    """Their sum in double, where one follows the other in this dimension, 1 or 2. On a GPU torch would first write both of them
    in double."""
    uses, rows, columns = both.shape
    shape = (uses, rows // 2, columns) if across == 1 else (uses, rows, columns // 2)
    halves = both.reshape(uses if across == 1 else uses * rows, 2, -1)
    total = conv_ops.add_up([halves], double=True) if _by_kernels(both) else halves.sum(1, dtype=torch.float64)
    return total.view(shape)


def _finite(t: Tensor) -> Tensor:
    """With zeros for what is not finite, whose weight is zero: a pass over memory that takes less than to mask examples."""
    return torch.nan_to_num(t, 0.0, 0.0, 0.0)


def _without(t: Tensor, dropped: Tensor) -> Tensor:
    return t.masked_fill(dropped.view(-1, 1, 1), 0.0)


def _loss(columns: int) -> float:
    """What adding up a Gram matrix over so many columns may lose, of the product of two rows' norms."""
    return (min(columns, _chunk(columns)) + -(-columns // _chunk(columns))) * _UNIT


def _chunk(columns: int) -> int:
    return max(_CHUNK, -(-columns // (_CHUNKS * ALIGNED)) * ALIGNED)


def _by_grams(uses: Sequence[Bounded]) -> tuple[Tensor, Tensor]:
    """‖H‖² from above, and L, of the examples of one use after those of the other."""
    k, j = (_grams([use._aligned[side] for use in uses]) for side in (0, 1))
    widths = max(use.a.shape[2] for use in uses), max(use.g.shape[2] for use in uses)
    of_a, of_g = map(_loss, widths)
    inner, by_j, by_k, lengths, trace_k, trace_j = _forms(k, j).unbind(1)
    least = k.shape[1] * _LEAST
    lost = (by_j * of_a).add_(by_k, alpha=of_g).add_(lengths.square(), alpha=3 * of_a * of_g + 2 * _UNIT)
    lost.add_(trace_k, alpha=widths[1] * least).add_(trace_j, alpha=widths[0] * least)
    return inner.clamp(min=0.0).add_(lost, alpha=1.01), lengths


def _forms(k: Tensor, j: Tensor) -> Tensor:
    """⟨K, J⟩, Σ_st ‖A_s‖‖A_t‖|J_st|, Σ_st ‖G_s‖‖G_t‖|K_st|, L, tr K and tr J of every example, [examples, 6] in double.

    The two sums over pairs are the most that errors of the other Gram matrix can amount to, relative to its rows' norms.
    """
    if _by_kernels(k):
        return conv_ops.gram_forms(k, j)
    squares = [gram.diagonal(dim1=1, dim2=2) for gram in (k, j)]
    norms = [square.sqrt() for square in squares]
    pairs = [
        ((gram.abs() @ n.unsqueeze(2)).squeeze(2) * n).sum(1, dtype=torch.float64)
        for gram, n in zip((j, k), norms, strict=True)
    ]
    lengths = (norms[0].double() * norms[1].double()).sum(1)
    traces = [square.sum(1, dtype=torch.float64) for square in squares]
    return torch.stack([(k * j).sum((1, 2), dtype=torch.float64), *pairs, lengths, *traces], 1)


def _grams(several: Sequence[Tensor]) -> Tensor:
    """t tᵀ of every example of each, with zeros for positions that are :func:`_missing`."""
    n, more = several[0].shape[1], _missing(several[0])
    stacks = [stack for t in several for stack in (_lengthened(t, more) if more else [t])]
    if len(stacks) == 1:
        return _gram(stacks[0])
    if get_proxy_mode() is not None:  # a trace records results, not the memory they are written to
        return torch.cat([_gram(stack) for stack in stacks])
    grams = several[0].new_empty(sum(map(len, stacks)), n + more, n + more, dtype=torch.float32)
    for stack, out in zip(stacks, grams.split([len(stack) for stack in stacks]), strict=True):
        _gram(stack, out)
    if more:
        grams[:, n:].zero_()
        grams[:, :n, n:].zero_()
    return grams


def _missing(t: Tensor) -> int:
    """Positions up to a multiple of eight on a GPU, where products of matrices of such a size take a quarter of the time."""
    return -t.shape[1] % ALIGNED if t.is_cuda else 0


def _lengthened(t: Tensor, more: int) -> list[Tensor]:
    """t with so many more positions, in stacks. Those are the next example's first ones where they follow in memory, so that
    only the last example is copied: whatever is made of them must be overwritten."""
    b, n, d = t.shape
    follow = t.stride() == (n * t.stride(1), t.stride(1), 1)
    if b <= 1 or more > n or not follow or get_proxy_mode() is not None:
        return [F.pad(t, (0, 0, 0, more))]
    return [t.as_strided((b - 1, n + more, d), t.stride()), F.pad(t[-1:], (0, 0, 0, more))]


def _gram(t: Tensor, out: Tensor | None = None) -> Tensor:
    """t tᵀ of every example, over a few columns at a time."""
    if t.shape[2] <= _CHUNK:
        return product(t, t.mT, out)
    first, *rest = t.split(_chunk(t.shape[2]), 2)
    gram = product(first, first.mT, out)
    for part in rest:
        gram += product(part, part.mT)
    return gram


def kind_in_bf16(a: Tensor, g: Tensor, shape: torch.Size, *, ordered: bool = False) -> type[Outer] | None:
    """What a use of these operands in bf16 is; None if it is treated like any other."""
    b, t, _ = a.shape
    if t == 1:
        return Outer if rows_of_an_example() > 1 else None  # an example's positions are rows here, and will be added up
    size = 4 * b * shape.numel()
    large = size > MADE_BYTES and size > MADE_RATIO * (a.nbytes + g.nbytes)
    if (large and not capturing()) or size > memory_cap(g):
        return Bounded
    return Unmade if size <= MADE_BYTES and not ordered and launches_cost(g) else None


def tied(head: Outer, table: Rows) -> Tied:
    return BoundedTied(head, table) if isinstance(head, Bounded) else Tied(head, table)
