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
    """What estimators share that first average g² − s², with the variance s² that each release really had."""

    remembers: ClassVar[tuple[str, ...]] = ("second",)

    def remember(self, evidence: Evidence[Any]) -> dict[str, Any]:
        rho = evidence.decay
        corrected = evidence.g_squared - evidence.noise_variance
        return {"second": evidence.memory["second"] * rho + corrected * (1.0 - rho)}

    def average(self, evidence: Evidence[Any]) -> Any:
        """a_t."""
        return evidence.memory["second"] / debias(evidence.decay, evidence.t)

    def standard_error(self, evidence: Evidence[Any]) -> Any:
        """Of a_t where there is no signal: s² √(2 Σ w_k²). Of one tensor, or rows of a stack; for the present s.

        One number a matrix, or one a coordinate where each has its own s.
        """
        weights = squared_weights(evidence.decay, evidence.t) * 2.0
        return evidence.noise_variance * (weights.sqrt() if isinstance(weights, Tensor) else math.sqrt(weights))


def over_matrix(values: Any) -> Any:
    """The mean over each matrix of [K, R, C]; a number is its own."""
    return values.mean((1, 2), keepdim=True) if isinstance(values, Tensor) else values


def error_of_mean(error: Any, shape: Sequence[int], over: tuple[int, ...]) -> Any:
    """Of the mean over these dimensions of matrices [K, R, C] of which each entry has this error: e/√n, e being its root mean
    square where entries differ."""
    n = math.prod(shape[d] for d in over)
    if not isinstance(error, Tensor) or error.shape[1:].numel() == 1:
        return error / math.sqrt(n)
    return error.square().mean(over, keepdim=True).sqrt() / math.sqrt(n)
