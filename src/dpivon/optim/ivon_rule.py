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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic

from dpivon.optim.curvature import (
    CorrectedSquaredGradient,
    CurvatureEstimator,
    Evidence,
    Matrices,
    estimate,
    memory_of,
    remembered,
)
from dpivon.optim.prior import damping, kept, pull
from dpivon.optim.rule import Hyper, full_like
from dpivon.optim.rule import debias as one_minus_power
from dpivon.optim.tensors import Values

#: Of :class:`dpivon.IVON`, of stacks and of every method made of them.
DEFAULTS: Mapping[str, float] = {
    "hess_init": 1.0,
    "beta1": 0.9,
    "beta2": 0.99999,
    "weight_decay": 1e-4,
    "curvature_decay": 0.99,
}


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
    prior_mean: Values | None = None,
) -> IVONState[Values]:
    """One step. ``debias`` is 1 − β₁ᵗ (or 1); ``h_hat=None`` leaves the curvature as it is. ``prior_mean`` is 0 if None."""
    m, s, h = state.mean, state.momentum, state.hess
    s = s * beta1 + g * (1.0 - beta1)
    if h_hat is not None:
        h = curvature_update(h, h_hat, beta2=beta2, weight_decay=weight_decay)
    step = (s / debias + pull(m, weight_decay, prior_mean)) / (h + weight_decay)
    if math.isfinite(clip_radius):
        step = step.clamp(min=-clip_radius, max=clip_radius)
    return IVONState(mean=m - step * lr, momentum=s, hess=h)


def ivon_step(
    state: Mapping[str, Values],
    evidence: Evidence[Values],
    estimator: CurvatureEstimator,
    matrices: Matrices = (),
    *,
    beta2: Any,
    **numbers: Any,
) -> dict[str, Values]:
    """The next state, the estimator's memory included. ``numbers`` are those of :func:`ivon_update`."""
    evidence = remembered(estimator, evidence)
    # With β₂ = 1 the curvature stays as it is, even where a target N_ess·g² would overflow.
    fixed = isinstance(beta2, float) and beta2 == 1.0
    new = ivon_update(
        IVONState(mean=state["mean"], momentum=state["momentum"], hess=evidence.hess),
        evidence.g,
        None if fixed else estimate(estimator, evidence, matrices),
        beta2=beta2,
        weight_decay=evidence.weight_decay,
        prior_mean=state.get("prior_mean"),
        **numbers,
    )
    # Not vars(new): torch.compile 2.13 makes an empty dictionary of it.
    return {"mean": new.mean, "momentum": new.momentum, "hess": new.hess, **evidence.memory, **kept(state)}


@dataclass(frozen=True)
class IVONRule:
    """IVON as an update rule, with any curvature estimator; its normals are those of the θ at which g was taken.

    ``lr`` is the paper's α, not multiplied by h₀ + δ. ``matrices`` says where tensors are in a row of a stack.
    """

    estimator: CurvatureEstimator = field(default_factory=CorrectedSquaredGradient)
    matrices: Matrices = ()

    name: ClassVar[str] = "ivon"
    defaults: ClassVar[Mapping[str, float]] = DEFAULTS
    draws: ClassVar[bool] = True
    takes_prior: ClassVar[bool] = True

    def start(self, mean: Values, hyper: Hyper) -> dict[str, Values]:
        own = {name: full_like(mean, 0.0) for name in memory_of(self.estimator)}
        return {"mean": mean, "momentum": full_like(mean, 0.0), "hess": full_like(mean, hyper["hess_init"]), **own}

    def perturbation(self, state: Mapping[str, Values], normal: Values, hyper: Hyper) -> Values:
        """θ − m."""
        return normal * std(state["hess"], ess=hyper["ess"], weight_decay=damping(state, hyper))

    def step(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, normal: Values | None, hyper: Hyper
    ) -> dict[str, Values]:
        assert normal is not None
        width = std(state["hess"], ess=hyper["ess"], weight_decay=damping(state, hyper))
        evidence: Evidence[Values] = Evidence(
            g=g,
            g_squared=g.square(),
            g_perturbation=g * normal * width if self.estimator.needs_sample else None,
            noise_variance=noise_variance,
            hess=state["hess"],
            ess=hyper["ess"],
            weight_decay=damping(state, hyper),
            batch_size=hyper["batch_size"],
            t=t,
            decay=hyper["curvature_decay"],
            memory={name: state[name] for name in memory_of(self.estimator)},
        )
        return ivon_step(
            state,
            evidence,
            self.estimator,
            self.matrices,
            lr=hyper["lr"],
            beta1=hyper["beta1"],
            beta2=hyper["beta2"],
            debias=one_minus_power(hyper["beta1"], t),
        )
