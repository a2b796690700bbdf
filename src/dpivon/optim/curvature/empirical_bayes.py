"""Shrinkage to the mean of the tensor, by as much as the noise calls for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dpivon.optim.curvature.averages import SquareAverage, over_matrix
from dpivon.optim.curvature.base import Evidence


@dataclass(frozen=True)
class EmpiricalBayes(SquareAverage):
    """v̂_i = M + λ (a_i − M), with M the mean of a over the tensor and

        λ = τ²/(τ² + e²),   τ² = max(Var_i a_i − e², 0),   e² = 2 s⁴ Σ w_k².

    Each a_i is v_i and noise of variance e²; the v_i of a tensor of n weights have mean M and variance τ², both estimated
    from the same tensor. λ is the linear rule of least squared error (a Wiener filter): as s → 0 λ → 1 and v̂ = a; without a
    signal λ → 0 and v̂ = M, whose noise is e/√n.

    Bias of one coordinate: (1 − λ)(M − v_i); of the mean over a tensor: none. Variance of one coordinate, for n ≫ 1:
    λ² e² + (1 − λ²) e²/n. Mean squared error over the tensor: λ e², never above a's e² (and M's τ² where that is less).
    Heavy-tailed v_i that stand out are kept nearly whole, since λ is then near 1; it is one λ for the tensor.
    Where each weight has its own e_i², so has its λ_i, and τ² is Var_i a_i less the mean of e_i²; the mean over the tensor then
    has a bias, the mean of λ_i (v_i − M), which is zero where e_i is not related to v_i.
    Not projected: v̂ is negative where a tensor's mean is not known to be positive, and IVON's recursion takes it.
    """

    base: ClassVar[str] = "empirical-bayes"
    elementwise: ClassVar[bool] = False
    pools: ClassVar[bool] = True

    def moment(self, evidence: Evidence[Any]) -> Any:
        a = self.average(evidence)
        noise = self.standard_error(evidence) ** 2
        mean = a.mean((1, 2), keepdim=True)
        off = a - mean
        spread = (off.square().mean((1, 2), keepdim=True) - over_matrix(noise)).clamp(min=0.0)
        # Where neither spread nor noise is left all a_i are the mean, whatever λ.
        return mean + off * (spread / (spread + noise).clamp(min=1e-38))
