"""A floor that knows the noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dpivon.optim.curvature.averages import SquareAverage
from dpivon.optim.curvature.base import Evidence


@dataclass(frozen=True)
class Floored(SquareAverage):
    """v̂ = max(a, c·e), with e = s² √(2 Σ w_k²) the standard error of a: no curvature below what could have been seen.

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
