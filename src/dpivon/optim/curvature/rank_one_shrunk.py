"""Rows times columns, each shrunk to the mean by as much as the noise calls for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from dpivon.optim.curvature.averages import SquareAverage, error_of_mean, over_matrix
from dpivon.optim.curvature.base import Evidence


class Parts(NamedTuple):
    """Of K matrices: M [K, 1, 1], r' [K, R, 1] and c' [K, 1, C], and the standard errors of M, r and c."""

    mean: Tensor
    rows: Tensor
    columns: Tensor
    error: Any
    row_error: Any
    column_error: Any


@dataclass(frozen=True)
class ShrunkRankOne(SquareAverage):
    """v̂_ij = r'_i c'_j / max(M, e/√(RC)), with r'_i = max(M + λ_r (r_i − M), 0), c' likewise, and the rest as in
    rank-one pooling.

    The mean r_i of a row has noise of variance e²/C, so λ_r = τ_r²/(τ_r² + e²/C) with τ_r² = max(Var_i r_i − e²/C, 0), and λ_c
    with e²/R: empirical Bayes on R + C numbers that are better known than the RC they stand for.

    Bias: that of rank one, and of shrinkage, (1 − λ_r)(M − r_i) relative to M for a row; none of either as s → 0 where v is of
    rank one. Variance for equal v_ij = v ≫ e/√min(R, C), where λ_r and λ_c are the estimates' own error: between that of M,
    e²/(RC), and rank one's e² (1/R + 1/C − 1/(RC)). Without a signal v̂ = max(M, 0) up to that error. A vector has one row:
    then v̂ is its shrinkage to the mean, projected. Where each coordinate has its own e_ij², a row has the mean of its own in
    place of e², and its own λ.
    """

    base: ClassVar[str] = "rank-one-shrunk"
    elementwise: ClassVar[bool] = False
    pools: ClassVar[bool] = True

    def moment(self, evidence: Evidence[Any]) -> Any:
        parts = self.parts(evidence)
        return parts.rows * (parts.columns / parts.mean.clamp(min=parts.error + 1e-38))

    def parts(self, evidence: Evidence[Any]) -> Parts:
        """M, r' and c', and how well M, r and c are known."""
        a, error = self.average(evidence), self.standard_error(evidence)
        mean = a.mean((1, 2), keepdim=True)
        whole, row, column = (error_of_mean(error, a.shape, over) for over in ((1, 2), (2,), (1,)))
        r, c = shrunk(a.mean(2, keepdim=True), mean, row), shrunk(a.mean(1, keepdim=True), mean, column)
        return Parts(mean, r, c, whole, row, column)


def shrunk(x: Tensor, mean: Tensor, error: Any) -> Tensor:
    """max(mean + λ (x − mean), 0) for the numbers of each [K, n, 1] or [K, 1, n], which have this error or each its own."""
    noise, off = error**2, x - mean
    spread = (off.square().mean((1, 2), keepdim=True) - over_matrix(noise)).clamp(min=0.0)
    return (mean + off * (spread / (spread + noise).clamp(min=1e-38))).clamp(min=0.0)
