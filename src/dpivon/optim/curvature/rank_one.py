"""Rows times columns, as Adafactor pools its second moment (Shazeer and Stern, 2018), after the noise is subtracted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dpivon.optim.curvature.averages import SquareAverage, error_of_mean
from dpivon.optim.curvature.base import Evidence


@dataclass(frozen=True)
class RankOne(SquareAverage):
    """v̂_ij = max(r_i, 0) max(c_j, 0) / max(M, e/√(RC)), with r, c and M the means of a over the rows, the columns and all of
    an R × C matrix.

    A convolution's kernel is the matrix [out, in·taps]. A vector (a bias, a gain) has one row: then v̂ = max(a, 0).

    Bias: where v is not of rank one, that of the approximation. Where it is, none to first order in the relative errors of
    r, c and M; the denominator's floor, its own standard error, matters where M is not known to be positive.
    Variance, to the same order, for equal v_ij = v ≫ e/√min(R, C):

        Var v̂ = e² (1/R + 1/C − 1/(RC)),

    so R·C/(R + C − 1) coordinates share what one of them alone would know. Where each has its own e_ij², e² is their mean over
    the row, the column or the matrix that is averaged.
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
