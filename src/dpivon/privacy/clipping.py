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
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from dpivon.errors import bad, check_number
from dpivon.privacy.precision import capturing, readable, wide

EPS_NUM = 1e-6
_BLOCK = 256  # coordinates whose squares are added in fp32; a row of 10⁷ added so would be wrong by up to a percent


#: Examples whose outer products are added in fp32 before the sum goes on in double: 64·2⁻²⁴ is 4e-6 of C.
EXAMPLES_AT_ONCE = 64
ROWS_AT_ONCE = 16  # the same of gradients that have been made and of small parameters, where fewer cost no more


@dataclass(frozen=True)
class FlatClipping:
    """One bound C on an example's norm over all parameters (the paper's), and what other rules are made of.

    A rule of one bound is a subclass with a ``name`` and a :meth:`factor` of its own; :func:`register_clipping` makes it known
    to ``make_private(clipping=…)``, ``Stack`` and ``fit``, to ledgers and to checkpoints:

    >>> @register_clipping
    ... class Normalised(FlatClipping):
    ...     name = "normalised"
    ...     def factor(self, norm): return self.sensitivity / (norm + 0.01)

    A rule may shrink examples as it likes: whatever it says, :func:`clip_factors` lets none of them count for more than C.
    """

    sensitivity: float
    name = "flat"
    joint = True  # one factor clips all of an example's parameters, so that it matters not which rows they are in

    @classmethod
    def of(cls, max_grad_norm: float | Sequence[float], parameters: int) -> Self:
        """The rule with the bound or bounds that ``make_private`` was given, for so many trainable parameters."""
        if isinstance(max_grad_norm, Sequence):
            raise bad(
                "max_grad_norm", max_grad_norm, f"is a list but clipping={cls.name!r}", "Give one bound, such as 1.0"
            )
        return cls(check_number("max_grad_norm", max_grad_norm, "Use a finite bound such as 1.0", above=0.0))

    @property
    def given(self) -> Any:
        """The bound or bounds, as ``make_private(max_grad_norm=…)`` takes them."""
        return self.sensitivity

    def factors(self, norms: Tensor) -> Tensor:
        """Clip factors of examples whose norms are given, one row per parameter, in the same shape."""
        return self.factor(torch.linalg.vector_norm(norms, dim=0, keepdim=True)).expand_as(norms)

    def factor(self, norm: Tensor) -> Tensor:
        """Of examples with these norms over all parameters."""
        return _factor(norm, self.sensitivity)

    def rescaled(self, sensitivity: float) -> Self:
        """The same rule with another C."""
        return replace(self, sensitivity=sensitivity)


@dataclass(frozen=True)
class PerLayerClipping:
    """A bound C_l for every parameter tensor; the sensitivity is (Σ C_l²)^½, and the noise is calibrated to that."""

    bounds: tuple[float, ...]
    name = "per_layer"
    joint = False

    @classmethod
    def of(cls, max_grad_norm: float | Sequence[float], parameters: int) -> Self:
        if not isinstance(max_grad_norm, Sequence) or len(max_grad_norm) != parameters:
            fix = f"Give a list of {parameters} bounds, one for each trainable parameter"
            raise bad("max_grad_norm", max_grad_norm, "does not fit clipping='per_layer'", fix)
        fix = "Use a finite bound such as 1.0 for every parameter"
        return cls(tuple(check_number("max_grad_norm", c, fix, above=0.0) for c in max_grad_norm))

    @property
    def given(self) -> Any:
        return list(self.bounds)

    @property
    def sensitivity(self) -> float:
        return float(torch.tensor(self.bounds, dtype=torch.float64).norm())

    def factors(self, norms: Tensor) -> Tensor:
        if len(norms) != len(self.bounds):
            problem = f"has {len(self.bounds)} bounds, and the number of parameters now trained is {len(norms)}"
            raise bad(
                "max_grad_norm", self.given, problem, "Freeze before make_private, with one bound for each that is left"
            )
        bounds = torch.tensor(self.bounds, dtype=norms.dtype, device=norms.device).unsqueeze(1)
        # An example that is bad in one tensor is dropped everywhere: half an example is not an example.
        usable = torch.isfinite(norms).all(dim=0, keepdim=True)
        return torch.where(usable, _factor(norms, bounds), torch.zeros_like(norms))

    def rescaled(self, sensitivity: float) -> Self:
        scale = sensitivity / self.sensitivity
        return replace(self, bounds=tuple(scale * bound for bound in self.bounds))


Clipping = FlatClipping | PerLayerClipping  # or a subclass of either
FLAT = FlatClipping(1.0)
CLIPPINGS: dict[str, type[Clipping]] = {"flat": FlatClipping, "per_layer": PerLayerClipping}
_R = TypeVar("_R", bound=type[Clipping])


def register_clipping(kind: _R) -> _R:
    """Make a class of clipping rules known by its ``name``; usable as a decorator."""
    if CLIPPINGS.setdefault(kind.name, kind) is not kind:
        raise bad("name", kind.name, "is another clipping rule's", "Give the class a name of its own")
    return kind


def make_clipping(clipping: str | Clipping, max_grad_norm: float | Sequence[float], parameters: int) -> Clipping:
    """The rule that was named with its bound or bounds, or the one given with its sensitivity made ``max_grad_norm``."""
    known = " or ".join(map(repr, CLIPPINGS))
    if isinstance(clipping, FlatClipping | PerLayerClipping) and CLIPPINGS.get(clipping.name) is type(clipping):
        return clipping.rescaled(FlatClipping.of(max_grad_norm, parameters).sensitivity)
    if clipping == "adaptive":
        raise bad(
            "clipping",
            clipping,
            "is refused: its quantile is a second release that Opacus computes from the private batch size",
            "Use 'flat' with a clip scheduler, or 'per_layer'",
        )
    if not isinstance(clipping, str) or clipping not in CLIPPINGS:
        fix = "Use 'flat', as the paper does, or decorate a rule of your own with register_clipping"
        raise bad("clipping", clipping, f"is not {known}", fix)
    return CLIPPINGS[clipping].of(max_grad_norm, parameters)


def clip_factors(clipping: Clipping, norms: Tensor) -> Tensor:
    """The rule's factors; of a rule that is not ours, cut so that no example counts for more than its sensitivity."""
    factors = clipping.factors(norms)
    if type(clipping) in (FlatClipping, PerLayerClipping):
        return factors
    factors = factors.clamp(min=0.0)
    lengths = torch.linalg.vector_norm(factors * norms, dim=0, keepdim=True)
    return torch.where(torch.isfinite(norms).all(0), factors * _factor(lengths, clipping.sensitivity), 0.0)


@torch.no_grad()
def clipped_sum(grad_samples: Sequence[Tensor], clipping: Clipping) -> list[Tensor]:
    """Σ_i ḡ_i for every parameter, from per-example gradients of shape (B, *parameter)."""
    rows = [wide(g.flatten(1)) for g in grad_samples]
    norms = torch.stack([row_norms(g).to(rows[0].device) for g in rows])
    factors = clip_factors(clipping, norms)
    dropped = dropped_examples(factors)
    sums = []
    for factor, g, sample in zip(factors, rows, grad_samples, strict=True):
        g = g if dropped is None else g.masked_fill(dropped.to(g.device).unsqueeze(1), 0.0)
        sums.append(weighted_sum(factor, g).reshape(sample.shape[1:]))
    return sums


def dropped_examples(factors: Tensor) -> Tensor | None:
    """Which examples are dropped, as not finite; None if values were read and there are none.

    0 · NaN is NaN: their gradients are to be taken out before anything multiplies them. Where values are not
    read it is done whether there are any or not.
    """
    dropped = (factors == 0.0).any(dim=0)
    return None if readable(dropped) and not bool(dropped.any()) else dropped


def weighted_sum(c: Tensor, rows: Tensor) -> Tensor:
    """Σ_i c_i rows_i in double: fp32 products of a few examples at a time, added up in double.

    While a program is being recorded it is written as a masked sum, which a compiler reads the rows for only once: a row
    with c_i = 0 counts for nothing there, whatever it holds.
    """
    c = c.to(rows)
    if capturing():
        terms = torch.where(c.unsqueeze(1) > 0, rows * c.unsqueeze(1), 0.0)
        return terms.sum(0, dtype=torch.float64)
    whole = len(rows) - len(rows) % ROWS_AT_ONCE
    if not whole:
        return (c @ rows).double()
    parts = torch.bmm(c[:whole].view(-1, 1, ROWS_AT_ONCE), rows[:whole].unflatten(0, (-1, ROWS_AT_ONCE)))
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
