"""What one use of a parameter leaves behind: enough to know its per-example norms and its weighted sum.

A parameter that was used several times in a pass (shared weights, several θ-samples) has several uses, and its per-example
gradient is their sum; :func:`merge` makes one use of them, with all cross terms.

Everything here is kept in fp32 or better, and sums over examples are added up in double: a norm that comes out too small, or a
rounded sum, would let one example contribute more than C.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dpivon.privacy.clipping import EXAMPLES_AT_ONCE, row_norms, weighted_sum
from dpivon.privacy.precision import capturing, launches_cost, product, weighted_product, wide, wide_dtype

#: Per-example gradients of one parameter are materialised up to this many bytes at a time.
MEMORY_CAP = 128 * 2**20
MEMORY_CAP_CUDA = 512 * 2**20
_FEW_BYTES = 4 * 2**20  # of gradients that are made on a GPU to save launches, though their norms are free


_batch = threading.local()
_SHORT = 256  # positions of an example that are compared pair by pair


class Use(Protocol):
    def squared_norm(self) -> Tensor:
        """‖g_i‖² for every example, [B]."""
        ...

    def weighted_sum(self, c: Tensor) -> Tensor:
        """Σ_i c_i g_i, in the parameter's shape."""
        ...

    def materialise(self) -> Tensor:
        """g_i for every example, [B, *shape]."""
        ...

    def without(self, struck: Tensor) -> Use:
        """The same use with the struck examples' gradients zero, whatever they were."""
        ...

    def grouped(self, rows: int) -> Use:
        """``rows`` consecutive rows are one example; their gradients add up."""
        ...


@runtime_checkable
class Unfolding(Protocol):
    """A use that knows norms and sums only: to be added to another, or scaled, it must become one that can."""

    def unfolded(self) -> Use: ...


@dataclass(frozen=True)
class Order:
    """The order of elements in which a rule computed, where it is not the parameter's: its shape, and how to permute it."""

    shape: torch.Size
    permutation: tuple[int, ...]

    @property
    def parameter(self) -> torch.Size:
        """The parameter's own shape."""
        return torch.Size(self.shape[i] for i in self.permutation)

    def restore(self, t: Tensor) -> Tensor:
        """From [*leading, elements] or [*leading, *shape] in this order to [*leading, *parameter]."""
        lead = t.dim() - 1 if t.shape[-1] == self.shape.numel() and len(self.shape) > 1 else t.dim() - len(self.shape)
        t = t.reshape(*t.shape[:lead], *self.shape)
        return t.permute(*range(lead), *(lead + i for i in self.permutation))


@dataclass(frozen=True)
class Dense:
    """Per-example gradients that are small enough to keep. ``g`` is [B, *shape], or in ``order``."""

    g: Tensor
    order: Order | None = None

    def squared_norm(self) -> Tensor:
        return row_norms(self.g.flatten(1)).square()

    def weighted_sum(self, c: Tensor) -> Tensor:
        total = weighted_sum(c, self.g.flatten(1))
        if self.order is not None:
            return self.order.restore(total)
        return total if self.g.dim() == 2 else total.reshape(self.g.shape[1:])

    def materialise(self) -> Tensor:
        return self.g if self.order is None else self.order.restore(self.g.flatten(1))

    def without(self, struck: Tensor) -> Dense:
        return Dense(_strike(self.g, struck), self.order)

    def grouped(self, rows: int) -> Dense:
        return Dense(self.g.unflatten(0, (-1, rows)).sum(1), self.order)


@dataclass(frozen=True)
class Outer:
    """g_i = Σ_t G_it ⊗ A_it: weights of linear layers and of convolutions on unfolded input.

    ``a`` is [B, T, d], ``g`` is [B, T, p]; the parameter has p·d elements, read as [p, d], or as [d, p] if ``transposed``.

    Its squared norm is ⟨AAᵀ, GGᵀ⟩ (*ghost*: 2T²(p+d) operations, 2T² numbers an example) or comes from the materialised
    gradient (2Tpd operations, pd numbers), in chunks if need be. A ghost norm is taken where it is cheaper, and only where
    it is exact enough: the Gram products cancel when rows share a large offset, by about ε_mach ‖A‖²‖G‖².
    """

    a: Tensor
    g: Tensor
    shape: torch.Size
    transposed: bool = False
    order: Order | None = None

    def squared_norm(self) -> Tensor:
        b, t, d = self.a.shape
        p = self.g.shape[2]
        if t == 1:
            return self._norm_bound()
        if t * (p + d) < p * d and 4 * b * p * d > memory_cap(self.a) and not capturing():
            return self._ghost_norm()
        return _made_norms(self.a, self.g)

    def _norm_bound(self) -> Tensor:
        """‖A‖²‖G‖², the squared norm itself if T = 1."""
        return _squares(self.a) * _squares(self.g)

    def _ghost_norm(self) -> Tensor:
        b, t, _ = self.a.shape
        out = torch.empty(b, dtype=wide_dtype(self.a), device=self.a.device)
        rows = max(1, memory_cap(self.a) // (8 * t * t))
        for i in range(0, b, rows):
            a, g = self.a[i : i + rows], self.g[i : i + rows]
            out[i : i + rows] = product(a, a.mT).mul_(product(g, g.mT)).sum((1, 2))
        smallest = torch.minimum(_squares(self.a), _squares(self.g))
        underflown = (smallest > 0.0) & (smallest < 1e-30)
        inexact = torch.finfo(out.dtype).eps * self._norm_bound() > 1e-6 * out
        loose = (inexact | underflown).nonzero().flatten()
        if len(loose):
            out[loose] = _made_norms(self.a[loose], self.g[loose])
        return out

    def weighted_sum(self, c: Tensor) -> Tensor:
        a, g = self.a, wide(self.g)
        g = g * c.to(g).view(-1, 1, 1)
        # As in weighted_sum: fp32 products over a few examples at a time, added up in double.
        whole = len(a) - len(a) % EXAMPLES_AT_ONCE
        if whole in (0, len(a)):
            total = self._products(a, g)
        else:
            total = self._products(a[:whole], g[:whole]) + self._products(a[whole:], g[whole:])
        return total.reshape(self.shape) if self.order is None else self.order.restore(total)

    def _products(self, a: Tensor, g: Tensor) -> Tensor:
        """Σ G ⊗ A over examples that are whole blocks of as many as are added in fp32, or fewer than one."""
        blocks, t = max(1, len(a) // EXAMPLES_AT_ONCE), a.shape[1]
        left, right = (x.reshape(blocks, len(a) // blocks * t, x.shape[2]) for x in (a, g))
        sums = weighted_product(left, right, parts=2 if t == 1 else 3)  # [blocks, d, p]
        return (sums if self.transposed else sums.mT).sum(0, dtype=torch.float64).flatten()

    def materialise(self) -> Tensor:
        g = (product(self.a.mT, self.g) if self.transposed else product(self.g.mT, self.a)).flatten(1)
        return g.reshape(len(g), *self.shape) if self.order is None else self.order.restore(g)

    def without(self, struck: Tensor) -> Outer:
        return Outer(_strike(self.a, struck), _strike(self.g, struck), self.shape, self.transposed, self.order)

    def grouped(self, rows: int) -> Outer:
        a, g = (t.unflatten(0, (-1, rows)).flatten(1, 2) for t in (self.a, self.g))
        return Outer(a, g, self.shape, self.transposed, self.order)


@dataclass(frozen=True)
class Rows:
    """g_i has G_it added to row index_it: embeddings. ``index`` is [B, T], ``g`` is [B, T, D]."""

    index: Tensor
    g: Tensor
    shape: torch.Size

    def squared_norm(self) -> Tensor:
        """Σ_{s,t} [index_s = index_t] ⟨G_s, G_t⟩, by adding up equal rows."""
        if self.index.shape[1] <= _SHORT:
            same = self.index.unsqueeze(2) == self.index.unsqueeze(1)  # [B, T, T]
            first = ~same.tril(-1).any(2)  # the first position of every row that occurs
            return ((same.to(self.g) @ self.g).square().sum(2) * first).sum(1)
        return self._long_squared_norm()

    def _long_squared_norm(self) -> Tensor:
        """The same, linear in T."""
        b = len(self.index)
        # Give every (example, row) pair its own slot, then add up what falls into one slot.
        key = self.index + torch.arange(b, device=self.index.device).unsqueeze(1) * self.shape[0]
        slots, place = key.flatten().unique(return_inverse=True)
        rows = self.g.new_zeros(len(slots), self.g.shape[2]).index_add_(0, place, self.g.flatten(0, 1))
        return self.g.new_zeros(b).index_add_(0, slots // self.shape[0], rows.square().sum(1))

    def weighted_sum(self, c: Tensor) -> Tensor:
        weighted = (self.g * c.to(self.g).view(-1, 1, 1)).flatten(0, 1).double()
        return weighted.new_zeros(self.shape).index_add_(0, self.index.flatten(), weighted)

    def materialise(self) -> Tensor:
        out = self.g.new_zeros(len(self.g), *self.shape)
        return out.scatter_add_(1, self.index.unsqueeze(2).expand_as(self.g), self.g)

    def without(self, struck: Tensor) -> Rows:
        return Rows(self.index, _strike(self.g, struck), self.shape)

    def grouped(self, rows: int) -> Rows:
        index, g = (t.unflatten(0, (-1, rows)).flatten(1, 2) for t in (self.index, self.g))
        return Rows(index, g, self.shape)


def unfolded(use: Use) -> Use:
    """The same use as one of the kinds above."""
    return use.unfolded() if isinstance(use, Unfolding) else use


def merge(uses: Sequence[Use]) -> Use:
    """One use whose per-example gradient is the sum of several."""
    if len(uses) == 1:
        return uses[0]
    uses = [unfolded(u) for u in uses]
    outers = [u for u in uses if isinstance(u, Outer)]
    if len(outers) == len(uses) and len({(u.transposed, u.order) for u in outers}) == 1:
        a, g = torch.cat([u.a for u in outers], 1), torch.cat([u.g for u in outers], 1)
        return Outer(a, g, outers[0].shape, outers[0].transposed, outers[0].order)
    rows = [u for u in uses if isinstance(u, Rows)]
    if len(rows) == len(uses):
        return Rows(torch.cat([u.index for u in rows], 1), torch.cat([u.g for u in rows], 1), rows[0].shape)
    total = uses[0].materialise()
    for use in uses[1:]:
        total = total + use.materialise()
    return Dense(total)


def outer_or_dense(a: Tensor, g: Tensor, shape: torch.Size, transposed: bool = False) -> Use:
    """An :class:`Outer`, materialised at once where memory allows.

    Materialised, a gradient gives its norm and its share of the sum for 2Tpd operations; kept as A and G, the sum alone costs
    that and the norm comes on top. With T = 1 the norm is free, and a large gradient is never made; a small one is, on a GPU,
    where it goes side by side with others.
    """
    b, _, d = a.shape
    p = g.shape[2]
    if not materialises(a, d, p):
        return Outer(a, g, shape, transposed)
    return Dense((product(a.mT, g) if transposed else product(g.mT, a)).reshape(b, *shape))


def materialises(g: Tensor, d: int, p: int) -> bool:
    """Whether per-example gradients of p·d elements, each a sum over the positions of g [B, T, …], are made and kept."""
    size = 4 * g.shape[0] * p * d
    return size <= memory_cap(g) if g.shape[1] > 1 else size <= _FEW_BYTES and launches_cost(g)


class views_of_examples:
    """Inside, so many consecutive rows of a batch are one example, whose gradients the book-keeper adds up."""

    __slots__ = ("_before", "_rows")

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __enter__(self) -> None:
        self._before = rows_of_an_example()
        _batch.rows = self._rows

    def __exit__(self, *error: object) -> None:
        _batch.rows = self._before


def rows_of_an_example() -> int:
    """A rule may leave gradients unmade where an example has several rows: added up first, there are fewer to make."""
    return getattr(_batch, "rows", 1)


def settled(use: Use) -> Use:
    """The same, materialised where memory allows: for what a rule left unmade, when its rows have been added up."""
    if not isinstance(use, Outer) or not materialises(use.g, use.a.shape[2], use.g.shape[2]):
        return use
    made = product(use.a.mT, use.g) if use.transposed else product(use.g.mT, use.a)
    return Dense(made.reshape(len(made), *use.shape) if use.order is None else made, use.order)


def memory_cap(t: Tensor) -> int:
    return MEMORY_CAP_CUDA if t.is_cuda else MEMORY_CAP


def _made_norms(a: Tensor, g: Tensor) -> Tensor:
    """‖Σ_t G_t ⊗ A_t‖² for every example, from gradients that are made some examples at a time."""
    at_once = max(1, memory_cap(a) // (4 * a.shape[2] * g.shape[2]))
    pairs = zip(a.split(at_once), g.split(at_once), strict=True)
    return torch.cat([product(right.mT, left).square().sum((1, 2)) for left, right in pairs])


def _squares(t: Tensor) -> Tensor:
    """Σ t² for every example, in double: before a normalisation G shrinks as A grows, and G² in fp32 can vanish, not GA."""
    return torch.linalg.vector_norm(t, dim=(1, 2), dtype=torch.float64).square()


def _strike(t: Tensor, struck: Tensor) -> Tensor:
    return t.masked_fill(struck.view(-1, *[1] * (t.dim() - 1)), 0.0)
