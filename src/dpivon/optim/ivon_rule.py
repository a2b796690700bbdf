"""IVON's update as a pure function of state, gradient, curvature target and hyperparameters.

Shen et al., *Variational Learning is Effective for Large Deep Networks*, ICML 2024, Algorithm 1, in the symbols of
*DP-IVON-Gradsq*, Algorithm 2:

    s ← β₁ s + (1 − β₁) g                                        momentum
    h ← β₂ h + (1 − β₂) ĥ + (1 − β₂)² (h − ĥ)² / (2 (h + δ))     curvature
    s̄ = s / (1 − β₁ᵗ)                                            debiased momentum
    m ← m − α (s̄ + δ m) / (h + δ)                                posterior mean
    σ² = 1 / (N_ess (h + δ))                                     posterior variance

The curvature recursion is a Riemannian retraction: it keeps h + δ ≥ (h + δ)/2 > 0 whatever the sign of ĥ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Generic

from dpivon.optim.tensors import Values


@dataclass(frozen=True)
class IVONState(Generic[Values]):
    """m, s and h of one parameter, of all parameters of a model, or of K stacked models."""

    mean: Values
    momentum: Values
    hess: Values


def variance(hess: Values, *, ess: Any, weight_decay: Any) -> Values:
    """Posterior variance σ² = 1 / (N_ess (h + δ))."""
    return std(hess, ess=ess, weight_decay=weight_decay).square()


def std(hess: Values, *, ess: Any, weight_decay: Any) -> Values:
    """Posterior standard deviation σ = (N_ess (h + δ))^(−½)."""
    return ((hess + weight_decay) * ess).rsqrt()


def curvature_update(hess: Values, h_hat: Values, *, beta2: Any, weight_decay: Any) -> Values:
    """The recursion for h alone."""
    d = (hess - h_hat) * (1.0 - beta2)  # in this form β₂ = 1 leaves h alone even where ĥ² would overflow
    return hess - d + d.square() / (hess + weight_decay) * 0.5


def ivon_update(
    state: IVONState[Values],
    g: Values,
    h_hat: Values | None,
    *,
    lr: Any,
    beta1: Any,
    beta2: Any,
    weight_decay: Any,
    debias: Any = 1.0,
    clip_radius: float = math.inf,
) -> IVONState[Values]:
    """One step. ``debias`` is 1 − β₁ᵗ (or 1); ``h_hat=None`` leaves the curvature as it is."""
    m, s, h = state.mean, state.momentum, state.hess
    s = s * beta1 + g * (1.0 - beta1)
    if h_hat is not None:
        h = curvature_update(h, h_hat, beta2=beta2, weight_decay=weight_decay)
    step = (s / debias + m * weight_decay) / (h + weight_decay)
    if math.isfinite(clip_radius):
        step = step.clamp(min=-clip_radius, max=clip_radius)
    return IVONState(mean=m - step * lr, momentum=s, hess=h)
