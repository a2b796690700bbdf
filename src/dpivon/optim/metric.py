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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpivon.errors import check_number, check_whole
from dpivon.optim.curvature import Evidence, Matrices, ShrunkRankOne, by_tensor, matrix, memory_of, remembered
from dpivon.optim.curvature.rank_one_shrunk import shrunk
from dpivon.optim.tensors import TensorList

_TINY = 1e-30  # where all there is is zero, all of it is alike
_FAR = 80.0  # exp of it, and of its opposite, is a number in fp32


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
        caution: standard errors of v̂ that are added to it everywhere: D differs from 1 by what is known, not by noise.
    """

    power: float = 0.25
    decay: float = 0.99
    every: int = 10
    bound: float = 10.0
    caution: float = 3.0

    def __post_init__(self) -> None:
        check_number("power", self.power, "Use 0.25 or 0.5", above=0.0, at_most=1.0)
        check_number("decay", self.decay, "Use about 0.99", at_least=0.0, below=1.0)
        check_whole("every", self.every, "Use a number of releases such as 10", at_least=1)
        check_number("bound", self.bound, "Use about 10", above=1.0, at_most=1e4)  # D² and s²/D² stay within fp32
        check_number("caution", self.caution, "Use about 3", at_least=0.0)

    def evidence(
        self, memory: Mapping[str, Any], g: Any, *, noise_variance: Any, t: Any, decay: Any = None
    ) -> Evidence[Any]:
        """What is known after step t: averages of g² − s² and of their error, with the s² that each g really had.

        ``memory`` is what was known before, zeros at first; ``decay`` is a column where g is the rows of a stack.
        """
        squares = g.square()
        evidence: Evidence[Any] = Evidence(
            g=g,
            g_squared=squares,
            g_perturbation=None,
            noise_variance=noise_variance,
            hess=squares,
            ess=1.0,
            weight_decay=0.0,
            t=t,
            decay=self.decay if decay is None else decay,
            memory=memory,
        )
        return remembered(_ESTIMATOR, evidence)

    def factors(
        self, evidence: Evidence[Any], matrices: Matrices = (), power: Any = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Of every tensor: rows' [K, R, 1] and columns' [K, 1, C], with K = 1 outside a stack.

        ``power`` may be a column [K, 1, 1]; ``matrices`` says where tensors are in a row of a stack.
        """
        p = self.power if power is None else power
        found = [_ESTIMATOR.parts(e) for e in by_tensor(evidence, matrices)]
        # Numbers, not a tensor of them: a step that is being captured cannot send any to the device.
        sizes = [f.rows.shape[1] * f.columns.shape[2] for f in found]
        means, errors = (torch.cat(both, 1) for both in zip(*((f.mean, f.error) for f in found), strict=True))
        tensors = shrunk(means, _weighted(means, sizes), errors)  # [K, tensors, 1]
        stretch, share = self._stretched(tensors, _weighted(tensors, sizes), errors, p)
        before = after = 0.0 * share[:, :1]
        parts = []
        for i, (f, size) in enumerate(zip(found, sizes, strict=True)):
            r, x = self._stretched(f.rows, _mean(f.rows), f.row_error, p)
            c, y = self._stretched(f.columns, _mean(f.columns), f.column_error, p)
            r, weight = r * stretch[:, i : i + 1], size * share[:, i : i + 1]
            before = before + weight * _mean(x) * _mean(y)
            after = after + weight * _mean(r.square() * x) * _mean(c.square() * y)
            parts.append((r, c))
        level = (before / after).sqrt()  # so that Σ D² v̂ = Σ v̂
        return [(r * level, c) for r, c in parts]

    def _stretched(self, values: Tensor, mean: Tensor, errors: Tensor, power: Any) -> tuple[Tensor, Tensor]:
        """(x^−p, x), x being the values in units of their mean, kept within the bound.

        A floor of so many standard errors is added to all of them alike: what is not known to differ is not treated as if it
        did. The errors' root mean square is taken, not each its own: a value of which D made the error small would
        lose its floor, and D would grow by itself.
        """
        floor = _mean(errors.square()).sqrt() * self.caution + _TINY
        shares, reach = (values + floor) / (mean + floor), math.log(self.bound) / 3.0
        # A small power would let x go so far that no number is left for it.
        far = reach / power
        most: Any = far.clamp(max=_FAR).exp() if isinstance(far, Tensor) else math.exp(min(far, _FAR))
        x = shares.clamp(min=1.0 / most, max=most)
        return x**-power, x


_ESTIMATOR = ShrunkRankOne()
MEMORY = memory_of(_ESTIMATOR)


def _mean(x: Tensor) -> Tensor:
    return x.mean((1, 2), keepdim=True)


def _weighted(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """The mean of [K, tensors, 1] over all coordinates."""
    total = x[:, :1] * sizes[0]
    for i, size in enumerate(sizes[1:], 1):
        total = total + x[:, i : i + 1] * size
    return total / sum(sizes)


def flat(factors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """D of K runs as rows, [K, P]."""
    return torch.cat([(r * c).flatten(1) for r, c in factors], 1)


def of_tensors(factors: Sequence[tuple[Tensor, Tensor]]) -> list[Factors]:
    """D of one model, tensor by tensor."""
    return [Factors(r[0], c[0]) for r, c in factors]


def starting(tensors: Sequence[Tensor]) -> dict[str, TensorList]:
    """What is remembered before the first release."""
    return {name: TensorList([torch.zeros_like(t, requires_grad=False) for t in tensors]) for name in MEMORY}
