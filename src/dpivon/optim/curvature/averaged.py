"""Average first, then correct, then project."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dpivon.optim.curvature.averages import SquareAverage
from dpivon.optim.curvature.base import Evidence


@dataclass(frozen=True)
class Averaged(SquareAverage):
    """v̂ = max(a, 0), with a the average of g² − s² (:mod:`dpivon.optim.curvature.averages`).

    Bias: only the projection's, of an average worth n = 1/Σ w_k² steps. Where there is no signal n a/s² + n is χ² with n
    degrees of freedom (exactly so for equal weights), and with f_k the density of χ²_k

        E v̂ = 2 s² f_{n+2}(n) ≈ s² / √(π n),

    .484 s² at n = 1, which is the paper's estimator, and .040 s² at ρ = .99. Where v ≫ s² √(2/n) there is none.
    Variance: at most that of a, (2 S² + 4 ḡ² S)/n for a gradient that keeps its distribution; s⁴ (1 − 1/π)/n without a signal.
    """

    base: ClassVar[str] = "averaged"
    remembers: ClassVar[tuple[str, ...]] = ("second",)

    def moment(self, evidence: Evidence[Any]) -> Any:
        return self.average(evidence).clamp(min=0.0)
