"""A metric to clip in: every example's gradient is stretched by a public D before it is clipped, and the release shrunk back.

    S = Σ_i clip_C(D ⊙ g_i) + N(0, σ²C² I),   g_dp = S / (b D),   D_ij = r_i c_j in every tensor

**Sensitivity.** ‖clip_C(D g_i)‖ ≤ C whatever D, and the noise is added to that very sum: σ, C and the account are the ordinary
ones. D may depend on earlier releases and on public numbers: the mechanism of step t is then chosen by what steps 1, …, t − 1
released, which adaptive composition allows at no cost. It must not depend on the batch at hand. This module is on
the public side of the boundary, and is handed released numbers alone, without the parameters they belong to.

**Noise.** Dividing by b D is post-processing. Coordinate j of g_dp has noise of variance s_j² = (σC/b)² / D_j², and that is
what every correction downstream is told (:class:`dpivon.Release`).

**Bias.** clip_C(D g)/D = g · min(1, C/‖D g‖): an example is still shortened and not turned. What changes is which examples are
shortened, those whose *stretched* gradient is long; the mean over examples is reweighted accordingly.

**Which D.** Let v_j be the second moment of the gradient. Under Σ D_j² v_j = Σ v_j, which leaves the root mean square of what
is clipped as it was, and so the meaning of C,

    Σ s_j²        (noise itself, for a step that does not divide)     is least for D_j ∝ v_j^(−1/4),
    Σ s_j²/v_j    (noise against signal, for one that divides by √v)  is least for D_j ∝ v_j^(−1/2)

by Lagrange's rule: Σ D⁻² + μ Σ D² v is stationary where D⁴ = 1/(μ v), and Σ D⁻²/v + μ Σ D² v where D⁴ = 1/(μ v²). ``power`` is
the exponent. v is v̂ of past releases, pooled over rows and columns and shrunk to the mean by as much as the noise calls for
(:class:`~dpivon.optim.curvature.ShrunkRankOne`): where nothing is known D is 1. Row times column is what book-keeping
needs: ‖D g‖ is then had from the layer's input and output gradient, each stretched by itself, and no gradient is made for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpivon.errors import check_number, check_whole
from dpivon.optim.curvature import Evidence, Matrices, ShrunkRankOne, by_tensor, matrix
from dpivon.optim.curvature.rank_one_shrunk import shrunk
from dpivon.optim.tensors import TensorList

_TINY = 1e-30  # where all there is is zero, all of it is alike


@dataclass(frozen=True)
class Factors:
    """D of one tensor, seen as a matrix (:func:`~dpivon.optim.curvature.matrix`): a column of rows' and a row of columns'."""

    rows: Tensor  # [R, 1]
    columns: Tensor  # [1, C]

    def full(self, shape: torch.Size) -> Tensor:
        """D in the tensor's own shape."""
        return (self.rows * self.columns).reshape(shape)

    @classmethod
    def of(cls, full: Tensor) -> Factors:
        """The factors of a D that has them."""
        whole = full.reshape(matrix(full.shape))
        return cls(whole[:, :1], whole[:1] / whole[:1, :1])


@dataclass(frozen=True)
class FactoredMetric:
    """D = v̂^(−power) of past releases, in factors.

    Attributes:
        power: 1/4 or 1/2, see above.
        decay: ρ of the average v̂ is read off.
        every: how many releases apart D is made anew. The first D is 1.
        bound: how far D may depart from its middle: a third of the way (on a logarithmic scale) for rows, columns and
            tensors each, so that max D / min D ≤ bound².
    """

    power: float = 0.5
    decay: float = 0.99
    every: int = 10
    bound: float = 10.0

    def __post_init__(self) -> None:
        check_number("power", self.power, "Use 0.5, or 0.25 for a step that does not divide", above=0.0, at_most=1.0)
        check_number("decay", self.decay, "Use about 0.99", at_least=0.0, below=1.0)
        check_whole("every", self.every, "Use a number of releases such as 10", at_least=1)
        check_number("bound", self.bound, "Use about 10", above=1.0)

    def evidence(self, second: Any, g: Any, *, noise_variance: Any, t: Any, decay: Any = None) -> Evidence[Any]:
        """What is known after step t: the average of g² − s², each with the s² that it really had, one more g in it.

        ``decay`` is a column where g is the rows of a stack.
        """
        rho = self.decay if decay is None else decay
        squares = g.square()
        second = second * rho + (squares - noise_variance) * (1.0 - rho)
        return Evidence(
            g=g,
            g_squared=squares,
            g_perturbation=None,
            noise_variance=noise_variance,
            hess=squares,
            ess=1.0,
            weight_decay=0.0,
            t=t,
            decay=rho,
            memory={"second": second},
        )

    def factors(
        self, evidence: Evidence[Any], matrices: Matrices = (), power: Any = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Of every tensor: rows' [K, R, 1] and columns' [K, 1, C], with K = 1 outside a stack.

        ``power`` may be a column [K, 1, 1]; ``matrices`` says where tensors are in a row of a stack.
        """
        p = self.power if power is None else power
        found = [ShrunkRankOne().parts(e) for e in by_tensor(evidence, matrices)]
        sizes = [r.shape[1] * c.shape[2] for _, _, r, c in found]
        weights = torch.tensor(sizes, dtype=found[0].rows.dtype, device=found[0].rows.device).view(1, -1, 1) / sum(
            sizes
        )
        means = torch.cat([f.mean for f in found], 1)  # [K, tensors, 1]
        errors = torch.cat([torch.as_tensor(f.error).to(means).expand(len(means), 1, 1) for f in found], 1)
        tensors = shrunk(means, (means * weights).sum(1, keepdim=True), errors)
        shares = (tensors + _TINY) / ((tensors * weights).sum(1, keepdim=True) + _TINY)
        scale, share = self._stretched(shares, p)
        before, after, parts = 0.0 * share[:, :1], 0.0 * share[:, :1], []
        for i, (_, _, rows, columns) in enumerate(found):
            (r, x), (c, y) = (
                self._stretched((v + _TINY) / (v.mean((1, 2), keepdim=True) + _TINY), p) for v in (rows, columns)
            )
            here, weight = slice(i, i + 1), weights[:, i : i + 1] * share[:, i : i + 1]
            before = before + weight * x.mean((1, 2), keepdim=True) * y.mean((1, 2), keepdim=True)
            moved = (r.square() * x).mean((1, 2), keepdim=True) * (c.square() * y).mean((1, 2), keepdim=True)
            after = after + weight * scale[:, here].square() * moved
            parts.append((r * scale[:, here], c))
        level = (before / after).sqrt()  # so that Σ D² v̂ = Σ v̂
        return [(r * level, c) for r, c in parts]

    def _stretched(self, shares: Tensor, power: Any) -> tuple[Tensor, Tensor]:
        """(x^−p, x), x being the shares kept within the bound."""
        most = self.bound ** (1.0 / (3.0 * power))
        x = torch.clamp(shares, min=1.0 / most, max=most) if isinstance(most, float) else _within(shares, most)
        return x**-power, x


def _within(x: Tensor, most: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(x, 1.0 / most), most)


def flat(factors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """D of K runs as rows, [K, P]."""
    return torch.cat([(r * c).flatten(1) for r, c in factors], 1)


def of_tensors(factors: Sequence[tuple[Tensor, Tensor]]) -> list[Factors]:
    """D of one model, tensor by tensor."""
    return [Factors(r[0], c[0]) for r, c in factors]


def starting(tensors: Sequence[Tensor]) -> TensorList:
    """The average before the first release."""
    return TensorList([torch.zeros_like(t, requires_grad=False) for t in tensors])
