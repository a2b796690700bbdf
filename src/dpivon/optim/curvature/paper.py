"""The three estimators that the paper compares: reparameterised, squared gradient, noise-corrected squared gradient."""

from __future__ import annotations

from dataclasses import dataclass

from dpivon.optim.curvature.evidence import Evidence
from dpivon.optim.tensors import Values


@dataclass(frozen=True)
class Reparameterised:
    """ĥ = g ⊙ (θ − m) / σ², with σ² = 1 / (N_ess (h + δ)): IVON's own.

    Price's theorem: E_q[∇² ℓ] = E_q[∇ℓ ⊙ (θ − m)/σ²], so ĥ is unbiased for the expected diagonal Hessian, and stays
    so under privacy noise, which is independent of θ − m; but that noise enters multiplied by 1/σ, which is why the
    paper replaces the estimator. A step that took no θ-sample leaves h as it is.
    """

    name = "reparam"
    elementwise = True
    needs_sample = True

    def __call__(self, evidence: Evidence[Values]) -> Values | None:
        if evidence.g_perturbation is None:
            return None
        return evidence.g_perturbation * (evidence.hess + evidence.weight_decay) * evidence.ess


@dataclass(frozen=True)
class SquaredGradient:
    """ĥ = N_ess g², as IVON offers it. Under privacy it contains the full noise variance: E[g_dp²] = ḡ² + s²."""

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
