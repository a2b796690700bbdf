"""Clipping: bound every example's contribution, then sum.

    ḡ_i = g_i · min(1, C / (‖g_i‖₂ + ε_num)),    S = Σ_i ḡ_i

Rounding must not let one example move S by more than C. A sum in bf16 would, and even in fp32 a sum of b coherent gradients is
rounded by about b·2⁻²⁴·C; so products are taken in fp32 over n examples at a time and added up in double
(:func:`weighted_sum`). S stays in double until the noise is in it.

The examples after one that is removed move up, into other blocks of n, and are rounded anew. Partial sums of a block are at
most kC long, k ≤ n, so a block is off by at most n(n+1)/2 · 2⁻²⁴ C, and all of them by b(n+1)/2 · 2⁻²⁴ C, in S(D) and in
S(D ∖ {x}): if every rounding pointed along x. Roundings have both signs and many directions, and a search for the worst
inputs at b = 512 (tests/privacy/test_worst_inputs.py) finds less than 10⁻⁵ C. A recorded program adds up all in double.

An example whose gradient is not finite contributes zero, so that S(D) and S(D ∖ {x}) differ by at most C for every x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpivon.errors import bad, check_number
from dpivon.privacy.precision import capturing, readable, wide

EPS_NUM = 1e-6
_BLOCK = 256  # coordinates whose squares are added in fp32; a row of 10⁷ added so would be wrong by up to a percent


#: Examples whose outer products are added in fp32 before the sum goes on in double: 64·2⁻²⁴ is 4e-6 of C.
EXAMPLES_AT_ONCE = 64
_ROWS_AT_ONCE = 16  # the same of gradients that have been made, where fewer cost no more


class Clipping(Protocol):
    """How per-example norms, one row a parameter, become clip factors of the same shape."""

    @property
    def sensitivity(self) -> float: ...

    @property
    def name(self) -> str:
        """As ``make_private(clipping=…)`` knows it."""
        ...

    @property
    def given(self) -> float | list[float]:
        """The bound or bounds, as ``make_private(max_grad_norm=…)`` takes them."""
        ...

    @property
    def joint(self) -> bool:
        """Whether one factor clips all of an example's parameters, so that it matters not which rows they are in."""
        ...

    def factors(self, norms: Tensor) -> Tensor: ...

    def rescaled(self, sensitivity: float) -> Clipping: ...


@dataclass(frozen=True)
class FlatClipping:
    """One bound C on the norm over all parameters (the paper's)."""

    sensitivity: float
    name = "flat"
    joint = True

    @property
    def given(self) -> float:
        return self.sensitivity

    def factors(self, norms: Tensor) -> Tensor:
        total = torch.linalg.vector_norm(norms, dim=0, keepdim=True)
        return _factor(total, self.sensitivity).expand_as(norms)

    def rescaled(self, sensitivity: float) -> FlatClipping:
        return FlatClipping(sensitivity)


@dataclass(frozen=True)
class PerLayerClipping:
    """A bound C_l for every parameter tensor; the sensitivity is (Σ C_l²)^½, and the noise is calibrated to that."""

    bounds: tuple[float, ...]
    name = "per_layer"
    joint = False

    @property
    def given(self) -> list[float]:
        return list(self.bounds)

    @property
    def sensitivity(self) -> float:
        return float(torch.tensor(self.bounds, dtype=torch.float64).norm())

    def factors(self, norms: Tensor) -> Tensor:
        bounds = torch.tensor(self.bounds, dtype=norms.dtype, device=norms.device).unsqueeze(1)
        # An example that is bad in one tensor is dropped everywhere: half an example is no example.
        usable = torch.isfinite(norms).all(dim=0, keepdim=True)
        return torch.where(usable, _factor(norms, bounds), torch.zeros_like(norms))

    def rescaled(self, sensitivity: float) -> PerLayerClipping:
        scale = sensitivity / self.sensitivity
        return PerLayerClipping(tuple(scale * bound for bound in self.bounds))


def make_clipping(clipping: str, max_grad_norm: float | Sequence[float], parameters: int) -> Clipping:
    """The clipping named, with its bound or bounds."""
    if clipping == "flat":
        if isinstance(max_grad_norm, Sequence):
            raise bad("max_grad_norm", max_grad_norm, "is a list but clipping='flat'", "Give one bound, such as 1.0")
        norm = check_number("max_grad_norm", max_grad_norm, "Use a finite bound such as 1.0", above=0.0)
        return FlatClipping(norm)
    if clipping == "per_layer":
        if not isinstance(max_grad_norm, Sequence) or len(max_grad_norm) != parameters:
            raise bad(
                "max_grad_norm",
                max_grad_norm,
                "does not fit clipping='per_layer'",
                f"Give a list of {parameters} bounds, one for each trainable parameter",
            )
        fix = "Use a finite bound such as 1.0 for every parameter"
        return PerLayerClipping(tuple(check_number("max_grad_norm", c, fix, above=0.0) for c in max_grad_norm))
    if clipping == "adaptive":
        raise bad(
            "clipping",
            clipping,
            "is refused: its quantile is a second release that Opacus computes from the private batch size",
            "Use 'flat' with a clip scheduler, or 'per_layer'",
        )
    raise bad("clipping", clipping, "is not one of 'flat', 'per_layer'", "Use 'flat', as the paper does")


@torch.no_grad()
def clipped_sum(grad_samples: Sequence[Tensor], clipping: Clipping) -> list[Tensor]:
    """Σ_i ḡ_i for every parameter, from per-example gradients of shape (B, *parameter)."""
    rows = [wide(g.flatten(1)) for g in grad_samples]
    norms = torch.stack([row_norms(g).to(rows[0].device) for g in rows])
    factors = clipping.factors(norms)
    struck = struck_examples(factors)
    sums = []
    for factor, g, sample in zip(factors, rows, grad_samples, strict=True):
        g = g if struck is None else g.masked_fill(struck.to(g.device).unsqueeze(1), 0.0)
        sums.append(weighted_sum(factor, g).reshape(sample.shape[1:]))
    return sums


def struck_examples(factors: Tensor) -> Tensor | None:
    """Which examples contribute nothing; None if it was seen that there are none.

    0 · NaN is NaN: their gradients are to be taken out before anything multiplies them. Where nobody looks that is done
    whether there are any or not, and changes nothing if not.
    """
    struck = (factors == 0.0).any(dim=0)
    return None if readable(struck) and not bool(struck.any()) else struck


def weighted_sum(c: Tensor, rows: Tensor) -> Tensor:
    """Σ_i c_i rows_i in double: fp32 products of a few examples at a time, added up in double.

    While a program is being recorded it is written as a masked sum, which a compiler reads the rows for only once: a row
    with c_i = 0 counts for nothing there, whatever it holds.
    """
    c = c.to(rows)
    if capturing():
        terms = torch.where(c.unsqueeze(1) > 0, rows * c.unsqueeze(1), 0.0)
        return terms.sum(0, dtype=torch.float64)
    whole = len(rows) - len(rows) % _ROWS_AT_ONCE
    if not whole:
        return (c @ rows).double()
    parts = torch.bmm(c[:whole].view(-1, 1, _ROWS_AT_ONCE), rows[:whole].unflatten(0, (-1, _ROWS_AT_ONCE)))
    total = parts.sum((0, 1), dtype=torch.float64)
    return total if whole == len(rows) else total + (c[whole:] @ rows[whole:]).double()


def row_norms(g: Tensor) -> Tensor:
    """‖g_i‖ for every row: squares added in fp32 over short blocks, the blocks in double."""
    whole = g.shape[1] - g.shape[1] % _BLOCK
    if not whole:
        return torch.linalg.vector_norm(g, dim=1).double()
    rest = None if whole == g.shape[1] else torch.linalg.vector_norm(g[:, whole:], dim=1).double()
    blocks = (g if rest is None else g[:, :whole]).unflatten(1, (-1, _BLOCK))
    norms = torch.linalg.vector_norm(torch.linalg.vector_norm(blocks, dim=2), dim=1, dtype=torch.float64)
    return norms if rest is None else torch.hypot(norms, rest)


def _factor(norm: Tensor, bound: float | Tensor) -> Tensor:
    """min(1, C / (‖g‖ + ε_num)); 0 where the norm is not finite, or so large that the factor would lose its digits in fp32."""
    factor = (bound / (norm + EPS_NUM)).clamp(max=1.0)
    usable = factor >= torch.finfo(torch.float32).tiny  # not so if the norm is not finite: its factor is 0 or NaN
    return torch.where(usable, factor, torch.zeros_like(factor))
