"""The squared gradient, as IVON offers it, and the paper's noise-corrected version of it."""

from __future__ import annotations

from dataclasses import dataclass

from dpivon.optim.curvature.base import Evidence
from dpivon.optim.tensors import Values


@dataclass(frozen=True)
class SquaredGradient:
    """ĥ = N_ess g². Under privacy it contains the full noise variance: E[g_dp²] = ḡ² + s²."""

    name = "gradsq"
    elementwise = True
    needs_sample = False

    def __call__(self, evidence: Evidence[Values]) -> Values:
        return evidence.g_squared * evidence.ess


@dataclass(frozen=True)
class CorrectedSquaredGradient:
    """ĥ = N_ess · max(g_dp² − s², 0), with s² = (σC/b)² the variance of the privacy noise (the paper, equation 1).

    The subtraction removes the noise's expectation, the projection puts part of it back: at zero signal
    E[max(g² − s², 0)] = 2 φ(1) s² ≈ 0.484 s². Without privacy s² = 0 and this is :class:`SquaredGradient`.
    """

    name = "gradsq-corrected"
    elementwise = True
    needs_sample = False

    def __call__(self, evidence: Evidence[Values]) -> Values:
        return (evidence.g_squared - evidence.noise_variance).clamp(min=0.0) * evidence.ess
