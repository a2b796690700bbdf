"""A step that is calm by construction, and a posterior whose width is its own affair.

IVON divides by h + δ and takes its width from the same h: under strong privacy h is mostly noise, and both go wrong together.
Here the step divides by the root mean square of what is released, noise included, and the curvature sets the width alone:

    s ← β₁ s + (1 − β₁) g,   s̄ = s / (1 − β₁ᵗ)                        momentum
    v̂ = an estimate of E[g²] − s²                                     (:mod:`dpivon.optim.curvature`)
    m ← m − α (s̄ + δ m) / (√(max(v̂, 0) + s²) + ν)                     mean
    h ← β₂ h + (1 − β₂) ĥ + (1 − β₂)² (h − ĥ)² / (2 (h + δ)),  ĥ = κ v̂   curvature
    σ² = T / (N_ess (h + δ))                                          posterior variance

s² is the variance of the noise in the release and is known, so where there is no signal the denominator is s itself, not an
estimate of it: the step is then α times noise of standard deviation √((1 − β₁)/(1 + β₁)), whatever σ, C and b. One α serves
every budget. As s → 0 the step is Adam's, with v̂ for its second moment. A loss, clip and noise scaled together by c leave the
step as it is (δ = ν = 0). Gradients are taken at the mean, and h₀ decays into the estimate at the rate β₂: the posterior is
narrow while the weights move most and widens from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dpivon.errors import bad
from dpivon.optim.curvature import (
    CurvatureEstimator,
    Evidence,
    Matrices,
    SecondMoment,
    estimate,
    memory_of,
    remembered,
    resolve,
)
from dpivon.optim.ivon_rule import curvature_update
from dpivon.optim.rule import REQUIRED, Hyper, debias, full_like
from dpivon.optim.tensors import Values

#: One λ a tensor, the Fisher's scale.
CURVATURE = "empirical-bayes-fisher"


def calm_step(
    mean: Values, momentum: Values, moment: Values, *, lr: Any, noise_variance: Any, decay: Any, nu: Any
) -> Values:
    """m − α (s̄ + δ m) / (√(max(v̂, 0) + s²) + ν)."""
    return mean - (momentum + mean * decay) / ((moment.clamp(min=0.0) + noise_variance).sqrt() + nu) * lr


@dataclass(frozen=True)
class Calm:
    """The rule, with any estimator of a second moment; ``matrices`` says where tensors are when it is given rows of a stack."""

    estimator: CurvatureEstimator = field(default_factory=lambda: resolve(CURVATURE))
    matrices: Matrices = ()

    name: ClassVar[str] = "calm"
    draws: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, float]] = {
        "ess": REQUIRED,
        "batch_size": 1.0,  # a release says it; without privacy g counts as the gradient of one example
        "beta1": 0.9,
        "beta2": 0.999,
        "curvature_decay": 0.99,
        "weight_decay": 1e-4,
        "hess_init": 1.0,
        "temperature": 1.0,
        "nu": 1e-8,
    }

    def __post_init__(self) -> None:
        if not isinstance(self.estimator, SecondMoment):
            raise bad(
                "curvature",
                self.estimator.name,
                "does not estimate a second moment of the gradient, which the calm step divides by",
                f"Use {CURVATURE!r}, 'averaged' or another SecondMoment",
            )

    def rate(self, hyper: Hyper, t: Any) -> Any:
        """α of step t."""
        return hyper["lr"]

    def start(self, mean: Values, hyper: Hyper) -> dict[str, Values]:
        own = {name: full_like(mean, 0.0) for name in memory_of(self.estimator)}
        return {"mean": mean, "momentum": full_like(mean, 0.0), "hess": full_like(mean, hyper["hess_init"]), **own}

    def step(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, normal: Values | None, hyper: Hyper
    ) -> dict[str, Values]:
        mean, beta1, hess = state["mean"], hyper["beta1"], state["hess"]
        evidence: Evidence[Any] = Evidence(
            g=g,
            g_squared=g.square(),
            g_perturbation=None,
            noise_variance=noise_variance,
            hess=hess,
            ess=hyper["ess"],
            weight_decay=hyper["weight_decay"],
            batch_size=hyper["batch_size"],
            t=t,
            decay=hyper["curvature_decay"],
            memory={name: state[name] for name in memory_of(self.estimator)},
        )
        evidence = remembered(self.estimator, evidence)
        h_hat = estimate(self.estimator, evidence, self.matrices)
        assert isinstance(self.estimator, SecondMoment)
        momentum = state["momentum"] * beta1 + g * (1.0 - beta1)
        mean = calm_step(
            mean,
            momentum / debias(beta1, t),
            h_hat / self.estimator.kappa(evidence),
            lr=self.rate(hyper, t),
            noise_variance=noise_variance,
            decay=hyper["weight_decay"],
            nu=hyper["nu"],
        )
        hess = curvature_update(hess, h_hat, beta2=hyper["beta2"], weight_decay=hyper["weight_decay"])
        return {"mean": mean, "momentum": momentum, "hess": hess, **evidence.memory}
