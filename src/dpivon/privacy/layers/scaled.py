"""A use whose gradients are stretched by D = rows ⊗ columns, before their norms are taken."""

from __future__ import annotations

from torch import Tensor

from dpivon.optim.metric import Factors
from dpivon.privacy.layers.uses import Dense, Order, Outer, Rows, Use, unfolded
from dpivon.privacy.precision import wide


def scaled(use: Use, factors: Factors) -> Use:
    """The use of D ⊙ g_i. An outer product stays one: ⟨D ⊙ (G ⊗ A)⟩ = (rows ⊙ G) ⊗ (columns ⊙ A), ghost norms and all."""
    use = unfolded(use)
    if isinstance(use, Outer) and (sides := _sides(use, factors)) is not None:
        a, g = (_stretched(t, by) for t, by in zip((use.a, use.g), sides, strict=True))
        return Outer(a, g, use.shape, use.transposed, use.order)
    if isinstance(use, Rows):
        each = factors.rows.flatten()[use.index].unsqueeze(2) * factors.columns
        return Rows(use.index, _stretched(use.g, each), use.shape)
    if isinstance(use, Dense) and use.order is not None:
        full = _ordered(factors.full(use.order.parameter), use.order)
        return Dense(_stretched(use.g, full.reshape(use.g.shape[1:])), use.order)
    g = use.materialise()
    return Dense(_stretched(g, factors.full(g.shape[1:])))


def _sides(use: Outer, factors: Factors) -> tuple[Tensor, Tensor] | None:
    """What A's and G's columns are multiplied with; None where they are not the parameter's rows and columns."""
    rows, columns = factors.rows.flatten(), factors.columns.flatten()
    if use.order is not None:
        if use.order.permutation[0] != 0 or use.transposed or len(rows) != use.order.shape[0]:
            return None
        columns = _ordered(columns.reshape(1, *use.shape[1:]), use.order).flatten()
    first, second = (columns, rows) if not use.transposed else (rows, columns)
    fits = len(first) == use.a.shape[2] and len(second) == use.g.shape[2]
    return (first, second) if fits else None


def _stretched(t: Tensor, by: Tensor) -> Tensor:
    return wide(t) * by.to(wide(t[:0]))


def _ordered(full: Tensor, order: Order) -> Tensor:
    """From the parameter's order of dimensions to the one a rule computed in."""
    return full.permute(*(order.permutation.index(i) for i in range(full.dim())))
