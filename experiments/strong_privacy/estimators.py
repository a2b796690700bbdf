"""Curvature estimators of the ablations, as plug-ins: importing this module registers them by their names.

None of them is recommended. Symbols are those of :mod:`dpivon.optim.curvature.averaged`: a is the average of g² − s² over
steps, e its standard error without a signal, v the second moment it estimates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dpivon.optim.curvature import Evidence, Reparameterised, SecondMoment, SquareAverage, register
from dpivon.optim.rule import debias


@dataclass(frozen=True)
class Signed(SecondMoment):
    """v̂ = g² − s², negative as often as it is. IVON's recursion keeps h + δ > 0 for any sign, so nothing need be projected.

    Bias: none, E[g²] − s² = v. Variance: for g ~ N(ḡ, S), S = s² + F/b,

        Var v̂ = 2 S² + 4 ḡ² S,

    2 s⁴ without a signal. The paper's projection has less variance and a bias of .484 s², which no average removes.
    """

    base: ClassVar[str] = "signed"

    def moment(self, evidence: Evidence[Any]) -> Any:
        return evidence.g_squared - evidence.noise_variance


@dataclass(frozen=True)
class Floored(SquareAverage):
    """v̂ = max(a, c·e): no curvature below what could have been seen.

    A posterior is as wide as its curvature is small, so an estimate of about zero is the most consequential of all, and
    the least certain. The floor falls as the average grows and vanishes without privacy.

    Bias: with a ~ N(v, e²) and z = v/e, E v̂ − v = e ((c − z) Φ(c − z) + φ(c − z)): 1.08 e at zero signal for c = 1, and nothing
    from v = (c + 3) e on. Second moment of v̂ at zero signal: e² (c² Φ(c) + c φ(c) + 1 − Φ(c)), so
    a variance of .068 e² for c = 1.
    """

    errors: float = 1.0

    base: ClassVar[str] = "floored"
    elementwise: ClassVar[bool] = False
    pools: ClassVar[bool] = True

    def moment(self, evidence: Evidence[Any]) -> Any:
        return self.average(evidence).clamp(min=self.standard_error(evidence) * self.errors)


@dataclass(frozen=True)
class RankOne(SquareAverage):
    """v̂_ij = max(r_i, 0) max(c_j, 0) / max(M, e/√(RC)), with r, c and M the means of a over the rows, the columns and all of
    an R × C matrix, as Adafactor pools its second moment (Shazeer and Stern, 2018), after the noise is subtracted.

    A convolution's kernel is the matrix [out, in·taps]. A vector (a bias, a gain) has one row: then v̂ = max(a, 0).

    Bias: where v is not of rank one, that of the approximation. Where it is, none to first order in the relative errors of
    r, c and M; the denominator's floor, its own standard error, matters where M is not known to be positive.
    Variance, to the same order, for equal v_ij = v ≫ e/√min(R, C):

        Var v̂ = e² (1/R + 1/C − 1/(RC)),

    so R·C/(R + C − 1) coordinates share what one of them alone would know.
    """

    base: ClassVar[str] = "rank-one"
    elementwise: ClassVar[bool] = False
    pools: ClassVar[bool] = True

    def moment(self, evidence: Evidence[Any]) -> Any:
        a = self.average(evidence)
        if a.shape[1] == 1:
            return a.clamp(min=0.0)
        rows = a.mean(2, keepdim=True).clamp(min=0.0)
        columns = a.mean(1, keepdim=True).clamp(min=0.0)
        least = error_of_mean(self.standard_error(evidence), a.shape, (1, 2)) + 1e-38
        return rows * (columns / a.mean((1, 2), keepdim=True).clamp(min=least))


class Parts(NamedTuple):
    """Of K matrices: M [K, 1, 1], r' [K, R, 1] and c' [K, 1, C], and the standard error of M."""

    mean: Tensor
    rows: Tensor
    columns: Tensor
    error: Tensor


@dataclass(frozen=True)
class ShrunkRankOne(SquareAverage):
    """v̂_ij = r'_i c'_j / max(M, e/√(RC)), with r'_i = max(M + λ_r (r_i − M), 0), c' likewise, and the rest as in
    rank-one pooling.

    The mean r_i of a row has noise of variance e²/C, so λ_r = τ_r²/(τ_r² + e²/C) with τ_r² = max(Var_i r_i − e²/C, 0), and λ_c
    with e²/R: empirical Bayes on R + C numbers that are better known than the RC they stand for.

    Bias: that of rank one, and of shrinkage, (1 − λ_r)(M − r_i) relative to M for a row; none of either as s → 0 where v is of
    rank one. Variance for equal v_ij = v ≫ e/√min(R, C), where λ_r and λ_c are the estimates' own error: between that of M,
    e²/(RC), and rank one's e² (1/R + 1/C − 1/(RC)). Without a signal v̂ = max(M, 0) up to that error. A vector has one row:
    then v̂ is its shrinkage to the mean, projected.
    """

    base: ClassVar[str] = "rank-one-shrunk"
    elementwise: ClassVar[bool] = False
    pools: ClassVar[bool] = True

    def moment(self, evidence: Evidence[Any]) -> Any:
        parts = self.parts(evidence)
        return parts.rows * (parts.columns / parts.mean.clamp(min=parts.error + 1e-38))

    def parts(self, evidence: Evidence[Any]) -> Parts:
        """M, r' and c', and how well M is known."""
        a, error = self.average(evidence), self.standard_error(evidence)
        mean = a.mean((1, 2), keepdim=True)
        whole, row, column = (error_of_mean(error, a.shape, over) for over in ((1, 2), (2,), (1,)))
        r, c = shrunk(a.mean(2, keepdim=True), mean, row), shrunk(a.mean(1, keepdim=True), mean, column)
        return Parts(mean, r, c, whole)


def shrunk(x: Tensor, mean: Tensor, error: Tensor) -> Tensor:
    """max(mean + λ (x − mean), 0) for the numbers of each [K, n, 1] or [K, 1, n], which have this error."""
    noise, off = error**2, x - mean
    spread = (off.square().mean((1, 2), keepdim=True) - noise.mean((1, 2), keepdim=True)).clamp(min=0.0)
    return (mean + off * (spread / (spread + noise).clamp(min=1e-38))).clamp(min=0.0)


def error_of_mean(error: Tensor, shape: Sequence[int], over: tuple[int, ...]) -> Tensor:
    """Of the mean over these dimensions of matrices [K, R, C] of which each entry has this error: e/√n."""
    n = 1
    for d in over:  # not math.prod, which torch.compile does not follow
        n *= shape[d]
    return error.square().mean(over, keepdim=True).sqrt() / math.sqrt(n)


@dataclass(frozen=True)
class CrossMoment(SecondMoment):
    """v̂ = max(p, M/10), with p the average of g_t ⊙ m_{t−1}, m the momentum of the gradients before t, and M = max(mean p, 0)
    over the tensor; ĥ = N_ess v̂.

    Batches and noises of different steps are independent, so for a gradient that changes slowly E[g_t m_{t−1}] = ḡ²: no noise
    to subtract and none left. But nothing of the sampling covariance either: at an optimum E g² − s² is F/b and this is 0. It
    estimates ḡ², not the Fisher, and there is no version of it scaled by b. On directions that oscillate it is negative,
    hence the floor at a tenth of the tensor's mean.

    Bias of p for ḡ²: none (the floor: as of any projection). Variance of one product, with S = s² + F/b and w = Σ w_k² of the
    momentum, (1 − β)/(1 + β) = .053 at β = .9 in the end:

        Var g_t m_{t−1} = (ḡ² + S)(ḡ² + w S) − ḡ⁴ = w S² + (1 + w) ḡ² S,

    a variance 38 times smaller than that of g² − s², 2 S², without a signal. There the products are uncorrelated, and their
    average over steps divides it by n.
    """

    momentum: float = 0.9

    base: ClassVar[str] = "cross"
    elementwise: ClassVar[bool] = False
    pools: ClassVar[bool] = True
    remembers: ClassVar[tuple[str, ...]] = ("earlier", "product")

    def remember(self, evidence: Evidence[Any]) -> dict[str, Any]:
        rho, beta, earlier = evidence.decay, self.momentum, evidence.memory["earlier"]
        total = debias(torch.full_like(rho, beta) if isinstance(rho, Tensor) else beta, _before(evidence.t))
        product = evidence.g * (earlier / total)  # zero in the first step, which has no gradients before it
        return {
            "earlier": earlier * beta + evidence.g * (1.0 - beta),
            "product": evidence.memory["product"] * rho + product * (1.0 - rho),
        }

    def product(self, evidence: Evidence[Any]) -> Any:
        """p."""
        return evidence.memory["product"] / debias(evidence.decay, _before(evidence.t))

    def moment(self, evidence: Evidence[Any]) -> Any:
        p = self.product(evidence)
        return p.clamp(min=p.mean((1, 2), keepdim=True).clamp(min=0.0) * 0.1)


def _before(t: Any) -> Any:
    """How many steps came before t, and 1 where none did."""
    if isinstance(t, list):
        return [_before(one) for one in t]
    return (t - 1).clamp(min=1) if isinstance(t, Tensor) else max(t - 1, 1)


@dataclass(frozen=True)
class PooledReparameterised:
    """ĥ = mean over the tensor's n weights of g ⊙ (θ − m)/σ², σ² = 1/(N_ess (h + δ)), the same for all of them.

    Bias: none for the tensor's mean of the expected diagonal Hessian, with privacy noise as without (Price's theorem; the
    noise is independent of θ − m). As an estimate of one weight's it has the bias of pooling. Unlike a square of gradients it
    sees the Hessian itself, negative or not.
    Variance due to the privacy noise: s² N_ess (h + δ) for one weight, where it makes the estimator useless, and

        Var ĥ = s² N_ess · mean(h + δ) / n

    for the mean, since the θ_i − m_i are independent; a smaller N_ess improves it, as a wider sample feels more curvature.
    """

    name: ClassVar[str] = "reparam-pooled"
    elementwise: ClassVar[bool] = False
    pools: ClassVar[bool] = True
    needs_sample: ClassVar[bool] = True

    def __call__(self, evidence: Evidence[Tensor]) -> Tensor | None:
        each: Tensor | None = Reparameterised()(evidence)
        return None if each is None else each.mean((1, 2), keepdim=True).expand_as(each)


for _kind in (Signed, Floored, RankOne, ShrunkRankOne):
    register(_kind(), _kind(scale="batch"))
register(CrossMoment(), PooledReparameterised())
