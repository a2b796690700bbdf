"""Averages over steps that estimators keep: a_t = Σ_k w_k (g_k² − s²), w_k = (1 − ρ) ρᵗ⁻ᵏ / (1 − ρᵗ).

The noise of a_t has variance 2 s⁴ Σ w_k² where there is no signal, and Σ w_k² = (1 − ρ)(1 + ρᵗ) / ((1 + ρ)(1 − ρᵗ)): one over
the number of steps that the average is worth, t at first and (1 + ρ)/(1 − ρ) in the end, 199 at ρ = .99.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from dpivon.optim.curvature.base import Evidence
from dpivon.optim.curvature.scale import SecondMoment
from dpivon.optim.rule import debias


def squared_weights(decay: Any, t: Any) -> Any:
    """Σ w_k² of a normalised average with decay ρ after t steps."""
    total = debias(decay, t)
    return (1.0 - decay) / (1.0 + decay) * (2.0 - total) / total


@dataclass(frozen=True)
class SquareAverage(SecondMoment):
    """What estimators share that first average g² − s², with the variance s² that each release really had.

    Those that ask for the error of the average keep Σ w_k² s_k⁴ beside it: σ may follow a schedule.
    """

    remembers: ClassVar[tuple[str, ...]] = ("second", "fourth")

    def remember(self, evidence: Evidence[Any]) -> dict[str, Any]:
        rho, s2, before = evidence.decay, evidence.noise_variance, evidence.memory
        second = before["second"] * rho + (evidence.g_squared - s2) * (1.0 - rho)
        if "fourth" not in self.remembers:
            return {"second": second}
        return {"second": second, "fourth": before["fourth"] * (rho * rho) + (s2 * s2) * (1.0 - rho) * (1.0 - rho)}

    def average(self, evidence: Evidence[Any]) -> Any:
        """a_t."""
        return evidence.memory["second"] / debias(evidence.decay, evidence.t)

    def standard_error(self, evidence: Evidence[Any]) -> Any:
        """Of a_t where there is no signal: √(2 Σ w_k² s_k⁴), which is s² √(2 Σ w_k²) if s never changed.

        Of one tensor, or rows of a stack. Without a memory of the s_k it is as if all were the present one.
        """
        if "fourth" in evidence.memory:
            return (evidence.memory["fourth"] * 2.0).sqrt() / debias(evidence.decay, evidence.t)
        weights = squared_weights(evidence.decay, evidence.t) * 2.0
        return evidence.noise_variance * (weights.sqrt() if isinstance(weights, Tensor) else math.sqrt(weights))


def over_matrix(values: Any) -> Any:
    """The mean over each matrix of [K, R, C]; a number is its own."""
    return values.mean((1, 2), keepdim=True) if isinstance(values, Tensor) else values


def error_of_mean(error: Any, shape: Sequence[int], over: tuple[int, ...]) -> Any:
    """Of the mean over these dimensions of matrices [K, R, C] of which each entry has this error: e/√n, e being its root mean
    square where entries differ."""
    n = 1
    for d in over:  # not math.prod, which torch.compile does not follow
        n *= shape[d]
    if not isinstance(error, Tensor) or error.shape[1:].numel() == 1:
        return error / math.sqrt(n)
    return error.square().mean(over, keepdim=True).sqrt() / math.sqrt(n)
