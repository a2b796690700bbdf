"""The squared gradient less the noise's variance, without a projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpivon.optim.curvature.base import Evidence
from dpivon.optim.curvature.scale import SecondMoment
from dpivon.optim.tensors import Values


@dataclass(frozen=True)
class Signed(SecondMoment):
    """v̂ = g² − s², negative as often as it is. IVON's recursion keeps h + δ > 0 for any sign, so nothing need be projected.

    Bias: none, E[g²] − s² = v. Variance: for g ~ N(ḡ, S), S = s² + F/b,

        Var v̂ = 2 S² + 4 ḡ² S,

    2 s⁴ without a signal. The paper's projection has less variance and a bias of .484 s², which no average removes.
    """

    base: ClassVar[str] = "signed"

    def moment(self, evidence: Evidence[Values]) -> Values:
        return evidence.g_squared - evidence.noise_variance
