"""Stochastic gradient Langevin dynamics, in which the privacy noise is the Langevin noise.

    θ ← θ − α G (g + δ θ) + √max(2αT G/N − α² G² s², 0) ξ,   ξ ~ N(0, I)

samples from p(θ | D)^{1/T} ∝ exp(−N (ℓ̄(θ) + δ‖θ‖²/2) / T) as α → 0, where g estimates ∇ℓ̄, N is the public number of training
examples, and δ θ is the gradient of the prior N(0, I/(Nδ)), which knows no data and is added after the release, outside the
clip. A released g contains noise of variance s² = (σC/b)²: the step then makes a Langevin step of temperature

    T_priv = α N G s² / 2 = α N G σ²C² / (2b²)

by itself (without minibatch noise). Where that is less than the wanted T the rest is topped up by ξ, after the boundary: it
costs no privacy and earns none. Where it is more, nothing can be taken away: the chain samples the posterior at T_priv.

SGLD has G = 1 (Welling and Teh, *Bayesian Learning via Stochastic Gradient Langevin Dynamics*, 2011; under privacy Wang,
Fienberg and Smola, *Privacy for Free*, 2015, and Li et al., *On Connecting Stochastic Gradient MCMC and Differential Privacy*,
2019). pSGLD has G = (v̂ + ν²)^(−½), v ← β₂ v + (1 − β₂) g² (Li et al., *Preconditioned Stochastic Gradient Langevin Dynamics*,
2016); as they do, we leave out the term Γ = ∇·G, which 1 − β₂ makes small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dpivon.optim.rule import REQUIRED, Hyper, debias, full_like
from dpivon.optim.tensors import Values

#: T = 1 is the posterior itself; networks predict far better from a colder one (Wenzel et al., *How Good is the Bayes Posterior
#: in Deep Neural Networks Really?*, 2020): of the demo's validation digits about .78 come out right at T = 1
#: (one seed), and .95 at this one (three).
TEMPERATURE = 0.1


def implied_temperature(*, lr: Any, ess: Any, noise_variance: Any, preconditioner: Any = 1.0) -> Any:
    """T_priv = α N G s² / 2, with s² the variance of the privacy noise in g."""
    return preconditioner * (lr * ess * noise_variance * 0.5)


@dataclass(frozen=True)
class SGLD:
    """The rule with G = 1. It remembers nothing but θ."""

    name: ClassVar[str] = "sgld"
    defaults: ClassVar[Mapping[str, float]] = {"ess": REQUIRED, "temperature": TEMPERATURE, "weight_decay": 1e-4}
    draws: ClassVar[bool] = True

    def start(self, mean: Values, hyper: Hyper) -> dict[str, Values]:
        return {"mean": mean}

    def step(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, normal: Values | None, hyper: Hyper
    ) -> dict[str, Values]:
        assert normal is not None
        theta, lr = state["mean"], hyper["lr"]
        missing = lr * 2.0 * hyper["temperature"] / hyper["ess"] - lr * lr * noise_variance
        topping = max(missing, 0.0) ** 0.5 if isinstance(missing, float) else missing.clamp(min=0.0).sqrt()
        return {"mean": theta - (g + theta * hyper["weight_decay"]) * lr + normal * topping}


@dataclass(frozen=True)
class PSGLD:
    """The rule with G from a running average of squared gradients."""

    name: ClassVar[str] = "psgld"
    defaults: ClassVar[Mapping[str, float]] = {**SGLD.defaults, "beta2": 0.99, "nu": 1e-5}
    draws: ClassVar[bool] = True

    def start(self, mean: Values, hyper: Hyper) -> dict[str, Values]:
        return {"mean": mean, "second": full_like(mean, 0.0)}

    def step(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, normal: Values | None, hyper: Hyper
    ) -> dict[str, Values]:
        assert normal is not None
        theta, lr, beta2 = state["mean"], hyper["lr"], hyper["beta2"]
        second = state["second"] * beta2 + g.square() * (1.0 - beta2)
        preconditioner = self.preconditioner(second, t=t, hyper=hyper)
        wanted = preconditioner * (lr * 2.0 * hyper["temperature"] / hyper["ess"])
        missing = wanted - preconditioner.square() * (lr * lr * noise_variance)
        drift = (g + theta * hyper["weight_decay"]) * preconditioner * lr
        return {"mean": theta - drift + normal * missing.clamp(min=0.0).sqrt(), "second": second}

    def preconditioner(self, second: Values, *, t: Any, hyper: Hyper) -> Values:
        """G = (v̂ + ν²)^(−½)."""
        return (second / debias(hyper["beta2"], t) + hyper["nu"] * hyper["nu"]).rsqrt()
