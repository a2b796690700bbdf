"""What one use of a parameter leaves behind: enough to know its per-example norms and its weighted sum.

A parameter that was used several times in a pass (shared weights, several θ-samples) has several uses, and its per-example
gradient is their sum; :func:`merge` makes one use of them, with all cross terms.

What is added up is what was measured. An example's gradient may cancel, over its positions or over its uses, down to the
rounding of its terms: two ways of computing it then give two different tensors, and one that is clipped by the norm of the
other contributes more than C. So norm and sum read one tensor, or make it twice by one product; or both are taken in double
and no example cancels by more than double can hold. Sums over examples are added up in double.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Protocol, cast

import torch
from torch import Tensor

from dpivon.privacy.clipping import EXAMPLES_AT_ONCE, ROWS_AT_ONCE, row_norms, weighted_sum
from dpivon.privacy.precision import capturing, launches_cost, now, product, readable, weighted_product, wide

#: Per-example gradients of one parameter are materialised up to this many bytes at a time.
MEMORY_CAP = 128 * 2**20
MEMORY_CAP_CUDA = 512 * 2**20
_FEW_BYTES = 4 * 2**20  # of gradients that are made on a GPU to save launches, though their norms are free
_CACHED = 16 * 2**20  # bytes of gradients that a CPU makes at a time where they are not kept
_SMALL = 4096  # elements of a parameter whose gradient may lie in a few of them, where roundings do not average out
_CANCELS = 1e3  # ‖A‖‖G‖ / ‖Σ G ⊗ A‖ up to which norms by Gram matrices in double are right to 1e-9
_VANISHES = 1e-36  # a weighted output gradient up to this counts as zero: a subnormal one could be rounded up


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

    def without(self, dropped: Tensor) -> Use:
        """The same use with the dropped examples' gradients zero, whatever they were."""
        ...

    def grouped(self, rows: int) -> Use:
        """``rows`` consecutive rows are one example; their gradients add up."""
        ...


@dataclass(frozen=True)
class Order:
    """The order of elements in which a rule computed, where it is not the parameter's: its shape, and how to permute it."""

    shape: torch.Size
    permutation: tuple[int, ...]

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
    dropped: Tensor | None = None

    def squared_norm(self) -> Tensor:
        return row_norms(self._kept.flatten(1)).square()

    def weighted_sum(self, c: Tensor) -> Tensor:
        g = self.g
        if self.dropped is not None:  # whatever is not finite has no weight; to mask whole rows takes twice the time
            c, g = c.masked_fill(self.dropped, 0.0), torch.nan_to_num(g, 0.0, 0.0, 0.0)
        total = weighted_sum(c, g.flatten(1))
        if self.order is not None:
            return self.order.restore(total)
        return total if g.dim() == 2 else total.reshape(g.shape[1:])

    def materialise(self) -> Tensor:
        return self._kept if self.order is None else self.order.restore(self._kept.flatten(1))

    @property
    def _kept(self) -> Tensor:
        return self.g if self.dropped is None else _drop(self.g, self.dropped)

    def without(self, dropped: Tensor) -> Dense:
        return Dense(self.g, self.order, dropped if self.dropped is None else dropped | self.dropped)

    def grouped(self, rows: int) -> Dense:
        return Dense(self._kept.unflatten(0, (-1, rows)).sum(1), self.order)


@dataclass(frozen=True)
class Outer:
    """g_i = Σ_t G_it ⊗ A_it: weights of linear layers and of convolutions on unfolded input.

    ``a`` is [B, T, d], ``g`` is [B, T, p]; the parameter has p·d elements, read as [p, d], or as [d, p] if ``transposed``.

    With T = 1 nothing cancels within an example: its norm is ‖A‖‖G‖, and its sum an fp32 product over a few examples at a
    time. With more positions its gradient is made twice, by the same product, for the norm and for the sum. Where Gram
    matrices are cheaper, norms are ⟨AAᵀ, GGᵀ⟩ (2T²(p+d) operations) and sums AᵀG over all examples, both in double: an
    example with ‖A‖‖G‖ = R‖g‖ is measured to about T·R²·2⁻⁵³ and summed to T·R·2⁻⁵³. Those above R = 10³ are made instead.
    """

    a: Tensor
    g: Tensor
    shape: torch.Size
    transposed: bool = False
    order: Order | None = None

    def squared_norm(self) -> Tensor:
        if self.a.shape[1] == 1:
            return self._norm_bound()
        if not self._grams_pay():
            return self._measured(self._examples())
        norms, cancelling = self._grams
        if len(cancelling):
            norms = norms.index_copy(0, cancelling, self._measured(cancelling))
        return norms

    def weighted_sum(self, c: Tensor) -> Tensor:
        if self.a.shape[1] == 1:
            total = self._contracted(c)
        elif not self._grams_pay():
            total = self._added_up(c, self._examples())
        else:
            cancelling = self._grams[1]
            g = self.g.double() * c.double().index_fill(0, cancelling, 0.0).view(-1, 1, 1)
            sums = self.a.double().flatten(0, 1).mT @ g.flatten(0, 1)  # [d, p]
            total = (sums if self.transposed else sums.mT).flatten()
            if len(cancelling):
                total = total + self._added_up(c, cancelling)
        return total.reshape(self.shape) if self.order is None else self.order.restore(total)

    def _norm_bound(self) -> Tensor:
        """‖A‖²‖G‖², the squared norm itself if T = 1."""
        return _squares(self.a) * _squares(self.g)

    def _grams_pay(self) -> bool:
        """Whether Gram matrices are cheaper, where double is not slow and it can be seen who cancels."""
        _, t, d = self.a.shape
        p = self.g.shape[2]
        return 0 < t * (p + d) < p * d and readable(self.a)

    @cached_property
    def _grams(self) -> tuple[Tensor, Tensor]:
        """The squared norms by Gram matrices, and which examples cancel too much for that."""
        parts = zip(*(t.split(max(1, memory_cap(t) // (16 * t.shape[1] ** 2))) for t in (self.a, self.g)), strict=True)
        doubles = ((a.double(), g.double()) for a, g in parts)
        norms = torch.cat([((a @ a.mT) * (g @ g.mT)).sum((1, 2)) for a, g in doubles])
        return norms, (~(self._norm_bound() <= _CANCELS**2 * norms)).nonzero().flatten()

    def _contracted(self, c: Tensor) -> Tensor:
        """Σ_i c_i G_i ⊗ A_i of examples with one position: fp32 products over a few at a time, added up in double."""
        a, g = self.a, wide(self.g)
        g = torch.nn.functional.hardshrink(g * c.to(g).view(-1, 1, 1), _VANISHES)
        at_once = ROWS_AT_ONCE if self.shape.numel() <= _SMALL else EXAMPLES_AT_ONCE
        whole = len(a) - len(a) % at_once
        if whole in (0, len(a)):
            return self._products(a, g, at_once)
        return self._products(a[:whole], g[:whole], at_once) + self._products(a[whole:], g[whole:], at_once)

    def _products(self, a: Tensor, g: Tensor, at_once: int) -> Tensor:
        """Σ G ⊗ A over examples that are whole blocks of as many as are added in fp32, or fewer than one."""
        blocks = max(1, len(a) // at_once)
        left, right = (x.reshape(blocks, len(a) // blocks, x.shape[2]) for x in (a, g))
        sums = weighted_product(left, right, parts=2)  # [blocks, d, p]
        return (sums if self.transposed else sums.mT).sum(0, dtype=torch.float64).flatten()

    def _examples(self) -> Tensor:
        return torch.arange(len(self.a), device=self.a.device)

    def _measured(self, examples: Tensor) -> Tensor:
        return measured_in_parts(self._rows, examples, self.shape.numel())

    def _added_up(self, c: Tensor, examples: Tensor) -> Tensor:
        return added_up_in_parts(self._rows, c, examples, self.shape.numel())

    def _rows(self, examples: Tensor) -> Tensor:
        return replace(self, a=self.a[examples], g=self.g[examples]).made().flatten(1)

    def made(self) -> Tensor:
        """g_i for every example as a matrix: [B, p, d], or [B, d, p] if transposed."""
        return product(self.a.mT, self.g) if self.transposed else product(self.g.mT, self.a)

    def materialise(self) -> Tensor:
        g = self.made()
        return g.reshape(len(g), *self.shape) if self.order is None else self.order.restore(g.flatten(1))

    def without(self, dropped: Tensor) -> Outer:
        without = replace(self, a=_drop(self.a, dropped), g=_drop(self.g, dropped))
        if "_grams" in vars(self):  # who is made must not change
            vars(without)["_grams"] = self._grams
        return without

    def grouped(self, rows: int) -> Outer:
        a, g = (t.unflatten(0, (-1, rows)).flatten(1, 2) for t in (self.a, self.g))
        return replace(self, a=a, g=g)


@dataclass(frozen=True)
class Rows:
    """g_i has G_it added to row index_it: embeddings. ``index`` is [B, T], ``g`` is [B, T, D]."""

    index: Tensor
    g: Tensor
    shape: torch.Size

    def squared_norm(self) -> Tensor:
        owners, _, rows = self._added
        squares = row_norms(rows).square()
        if self._pairwise:
            return squares.view(self.index.shape).sum(1)
        return squares.new_zeros(len(self.index)).index_add_(0, owners, squares)

    def weighted_sum(self, c: Tensor) -> Tensor:
        owners, places, rows = self._added
        weighted = rows.double() * c.double()[owners].unsqueeze(1)
        return weighted.new_zeros(self.shape).index_add_(0, places, weighted)

    @property
    def _pairwise(self) -> bool:
        """Whether positions are compared pair by pair; on a GPU wherever that fits, since sorting them waits for it."""
        b, t = self.index.shape
        return t <= _SHORT or (self.index.is_cuda and 4 * b * t * t <= MEMORY_CAP_CUDA)

    @cached_property
    def _added(self) -> tuple[Tensor, Tensor, Tensor]:
        """Whose, which, and what: an example's gradient of one row of the table, all its positions added up."""
        (b, t), count = self.index.shape, self.shape[0]
        owners = torch.arange(b, device=self.index.device).unsqueeze(1)
        if self._pairwise:
            same = self.index.unsqueeze(2) == self.index.unsqueeze(1)  # [B, T, T]
            first = ~same.tril(-1).any(2, keepdim=True)  # a row that occurs again is added up where it occurs first
            rows = (same.to(self.g) @ self.g).where(first, 0.0)
            return owners.expand(b, t).flatten(), self.index.flatten(), rows.flatten(0, 1)
        # Linear in T: every pair of an example and a row has its own slot.
        slots, place = (self.index + owners * count).flatten().unique(return_inverse=True)
        rows = self.g.new_zeros(len(slots), self.g.shape[2]).index_add_(0, place, self.g.flatten(0, 1))
        return slots // count, slots % count, rows

    def joined(self, others: Sequence[Rows]) -> Rows:
        """With others of the same table; their gradients add up."""
        uses = [self, *others]
        return Rows(torch.cat([u.index for u in uses], 1), torch.cat([u.g for u in uses], 1), self.shape)

    def materialise(self) -> Tensor:
        out = self.g.new_zeros(len(self.g), *self.shape)
        return out.scatter_add_(1, self.index.unsqueeze(2).expand_as(self.g), self.g)

    def without(self, dropped: Tensor) -> Rows:
        without = Rows(self.index, _drop(self.g, dropped), self.shape)
        if "_added" in vars(self):
            owners, places, rows = self._added
            vars(without)["_added"] = owners, places, _drop(rows, dropped[owners])
        return without

    def grouped(self, rows: int) -> Rows:
        index, g = (t.unflatten(0, (-1, rows)).flatten(1, 2) for t in (self.index, self.g))
        return Rows(index, g, self.shape)


def unfolded(use: Use) -> Use:
    """The same use as one of the kinds above. A use that knows norms and sums only has a method for it."""
    unfold = getattr(use, "unfolded", None)
    return use if unfold is None else cast(Use, unfold())


def merge(uses: Sequence[Use]) -> Use:
    """One use whose per-example gradient is the sum of several."""
    if len(uses) == 1:
        return uses[0]
    if hasattr(uses[0], "joined") and len({type(use) for use in uses}) == 1:
        return cast(Use, uses[0].joined(uses[1:]))
    uses = [unfolded(u) for u in uses]
    outers, rows = [u for u in uses if isinstance(u, Outer)], [u for u in uses if isinstance(u, Rows)]
    kinds = {(type(u), u.transposed, u.order) for u in outers}
    if len(outers) + len(rows) == len(uses) and len(kinds) == 1:
        head = outers[0]
        if len(outers) > 1:
            head = replace(head, a=torch.cat([u.a for u in outers], 1), g=torch.cat([u.g for u in outers], 1))
        if not rows:
            return head if head._grams_pay() else settled(head)
        if head.order is None and not head.transposed:
            from dpivon.privacy.layers.bounded import tied  # which is made of these

            return tied(head, rows[0].joined(rows[1:]))
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
    kind = _kind_in_bf16()(a, g, shape) if a.dtype is g.dtype is torch.bfloat16 else None
    return _materialised(Outer(a, g, shape, transposed)) if kind is None else kind(a, g, shape, transposed)


def materialises(g: Tensor, d: int, p: int) -> bool:
    """Whether per-example gradients of p·d elements, each a sum over the positions of g [B, T, …], are made and kept."""
    size = 4 * g.shape[0] * p * d
    return size <= memory_cap(g) if g.shape[1] > 1 else size <= _FEW_BYTES and launches_cost(g)


def rows_of_an_example() -> int:
    """A rule may leave gradients unmade where an example has several rows: added up first, there are fewer to make."""
    return now.rows


def settled(use: Use) -> Use:
    """The same, materialised where memory allows: for what a rule left unmade, when its rows have been added up."""
    if type(use) is not Outer:
        return use
    in_bf16 = use.a.dtype is use.g.dtype is torch.bfloat16
    kind = _kind_in_bf16()(use.a, use.g, use.shape, ordered=use.order is not None) if in_bf16 else None
    return _materialised(use) if kind is None else kind(use.a, use.g, use.shape, use.transposed, use.order)


@cache
def _kind_in_bf16() -> Callable[..., type[Outer] | None]:
    from dpivon.privacy.layers.bounded import kind_in_bf16  # which is made of these

    return kind_in_bf16


def _materialised(use: Outer) -> Use:
    """The same, materialised where memory allows."""
    if not materialises(use.g, use.a.shape[2], use.g.shape[2]):
        return use
    made = use.made()
    return Dense(made.reshape(len(made), *use.shape) if use.order is None else made, use.order)


def memory_cap(t: Tensor) -> int:
    return MEMORY_CAP_CUDA if t.is_cuda else MEMORY_CAP


def measured_in_parts(make: Callable[[Tensor], Tensor], examples: Tensor, size: int) -> Tensor:
    """‖g_i‖² of these examples. ``make`` makes some of their gradients, as rows, in ``size`` numbers of memory for each."""
    return torch.cat([row_norms(make(part)) for part in _parts(examples, size)]).square()


def added_up_in_parts(make: Callable[[Tensor], Tensor], c: Tensor, examples: Tensor, size: int) -> Tensor:
    """Σ c_i g_i over these examples, from the rows that :func:`measured_in_parts` measured, made again."""
    parts = _parts(examples, size)
    total = weighted_sum(c[parts[0]], make(parts[0]))
    for part in parts[1:]:
        total += weighted_sum(c[part], make(part))
    return total


def _parts(examples: Tensor, size: int) -> Sequence[Tensor]:
    room = memory_cap(examples)
    room = room if examples.is_cuda or capturing() else min(room, _CACHED)
    return examples.split(max(1, room // (4 * size)))


def _squares(t: Tensor) -> Tensor:
    """Σ t² for every example, in double: before a normalisation G shrinks as A grows, and G² in fp32 can vanish, not GA."""
    return torch.linalg.vector_norm(t, dim=(1, 2), dtype=torch.float64).square()


def _drop(t: Tensor, dropped: Tensor) -> Tensor:
    return t.masked_fill(dropped.view(-1, *[1] * (t.dim() - 1)), 0.0)
