"""The reparameterised estimator (Price's theorem), IVON's own."""

from __future__ import annotations

from dataclasses import dataclass

from dpivon.optim.curvature.base import Evidence
from dpivon.optim.tensors import Values


@dataclass(frozen=True)
class Reparameterised:
    """ĥ = g ⊙ (θ − m) / σ², with σ² = 1 / (N_ess (h + δ)).

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
