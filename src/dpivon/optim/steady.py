"""A step of known size under privacy noise, with a posterior whose width is set apart from it: DP-Calm and DP-Steady.

IVON divides by h + δ and takes its width from the same h: under strong privacy h is mostly noise, and both go wrong together.
Here the step divides by the root mean square of what is released, noise included, and the curvature sets the width alone:

    s ← β₁ s + (1 − β₁) g,   s̄ = s / (1 − β₁ᵗ)                        momentum
    v̂ = an estimate of E[g²] − s²                                     (:mod:`dpivon.optim.curvature`)
    m ← m − α (s̄ + δ m) / max(√(max(v̂, 0) + s²) + ν, α δ)             mean
    h ← β₂ h + (1 − β₂) ĥ + (1 − β₂)² (h − ĥ)² / (2 (h + δ)),  ĥ = κ v̂   curvature
    σ² = T / (N_ess (h + δ))                                          posterior variance

s² is the variance of the noise in the release and is known, so where there is no signal the denominator is s itself, not an
estimate of it: the step is then α times noise of standard deviation √((1 − β₁)/(1 + β₁)), whatever σ, C and b. So α means the
same at every budget. As s → 0 the step is Adam's, with v̂ for its second moment. A loss, clip and noise scaled together by c
leave the step as it is (δ = ν = 0). Gradients are taken at the mean, and h₀ decays into the estimate at the rate β₂.

**DP-Steady** states α in units of the weights. T steps of noise alone are a random walk of α √T in every coordinate, so

    α = r w / √T,   w the root mean square of the first weights (those of matrices and kernels)

and r is how many times their own size noise alone would move the weights over the whole training. It is also the step that
the theory of noisy gradient descent asks for, distance over √T times the root mean square of what is released, with
r‖w‖ for the unknown distance. w is of the initialisation and T of the plan: both public. Where T is not known,
α_t = r w / (2 √t) has the same Σ α_t over T steps.

With few steps α is large, and the first of them would move the weights by their own size. So the step climbs, by the step of a
plan of ``ramp`` R steps each time, and is at its full size after √(R/T) steps:

    α_t = min(r w / √T, t r w / √R) = r w / √max(T, R/t²)

``fade`` f lets the step shrink in a straight line to 1 − f of what it was, its mean square over the training unchanged:

    α_t = α (1 − f τ) / √(1 − f + f²/3),   τ = (t − ½)/T
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpivon.errors import bad
from dpivon.optim.curvature import (
    CurvatureEstimator,
    Evidence,
    Matrices,
    SecondMoment,
    estimate,
    matrix,
    memory_of,
    remembered,
    resolve,
)
from dpivon.optim.ivon_rule import curvature_update, variance
from dpivon.optim.prior import damping, kept, pull
from dpivon.optim.rule import REQUIRED, Hyper, debias, full_like
from dpivon.optim.rule_optimizer import RuleOptimizer
from dpivon.optim.tensors import Values
from dpivon.posterior import Posterior
from dpivon.release import Release


def calm_step(
    mean: Values,
    momentum: Values,
    moment: Values,
    *,
    lr: Any,
    noise_variance: Any,
    decay: Any,
    nu: Any,
    prior_mean: Values | None = None,
) -> Values:
    """m − α (s̄ + δ (m − μ)) / D with D = max(√(max(v̂, 0) + s²) + ν, α δ).

    So a step never passes the prior's mean by its pull alone: where δ is that large, m becomes μ − s̄/δ.
    """
    least = [decay * rate for rate in lr] if isinstance(lr, list) and isinstance(decay, float) else decay * lr
    size = ((moment.clamp(min=0.0) + noise_variance).sqrt() + nu).clamp(min=least)
    return mean - (momentum + pull(mean, decay, prior_mean)) / size * lr


@dataclass(frozen=True)
class Calm:
    """DP-Calm's rule, with any estimator of a second moment.

    ``matrices`` says where tensors are when it is given rows of a stack.
    """

    estimator: CurvatureEstimator = field(default_factory=lambda: resolve("empirical-bayes-fisher"))
    matrices: Matrices = ()

    name: ClassVar[str] = "calm"
    draws: ClassVar[bool] = False
    takes_prior: ClassVar[bool] = True
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
                "Use 'empirical-bayes-fisher', 'averaged' or another SecondMoment",
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
        assert isinstance(self.estimator, SecondMoment)
        mean, beta1, weight_decay = state["mean"], hyper["beta1"], damping(state, hyper)
        evidence: Evidence[Any] = Evidence(
            g=g,
            g_squared=g.square(),
            g_perturbation=None,
            noise_variance=noise_variance,
            hess=state["hess"],
            ess=hyper["ess"],
            weight_decay=weight_decay,
            batch_size=hyper["batch_size"],
            t=t,
            decay=hyper["curvature_decay"],
            memory={name: state[name] for name in memory_of(self.estimator)},
        )
        evidence = remembered(self.estimator, evidence)
        h_hat = estimate(self.estimator, evidence, self.matrices)
        momentum = state["momentum"] * beta1 + g * (1.0 - beta1)
        mean = calm_step(
            mean,
            momentum / debias(beta1, t),
            h_hat / self.estimator.kappa(evidence),
            lr=self.rate(hyper, t),
            noise_variance=noise_variance,
            decay=weight_decay,
            nu=hyper["nu"],
            prior_mean=state.get("prior_mean"),
        )
        hess = curvature_update(state["hess"], h_hat, beta2=hyper["beta2"], weight_decay=weight_decay)
        return {"mean": mean, "momentum": momentum, "hess": hess, **evidence.memory, **kept(state)}


@dataclass(frozen=True)
class Steady(Calm):
    """DP-Steady's rule. ``lr`` is r. Its curvature sets the step; ``temperature`` above 0 makes it the width as well.

    By default one v̂ for all weights: the step goes where gradient descent goes, and is as long as its theory asks for.
    """

    estimator: CurvatureEstimator = field(default_factory=lambda: resolve("whole-fisher"))

    name: ClassVar[str] = "steady"
    defaults: ClassVar[Mapping[str, float]] = {
        **Calm.defaults,
        "temperature": 0.0,
        "steps": 0.0,
        "scale": REQUIRED,
        "fade": 0.0,
        "ramp": 400.0,
    }

    def rate(self, hyper: Hyper, t: Any) -> Any:
        size, steps, fade, ramp = hyper["lr"] * hyper["scale"], hyper["steps"], hyper["fade"], hyper["ramp"]
        if isinstance(t, list):
            return [self.rate(hyper, each) for each in t]
        if isinstance(t, Tensor):
            now, planned = t.to(steps.dtype), steps.clamp(min=1.0)
            left = 1.0 - fade * ((now - 0.5) / planned).clamp(max=1.0)
            least = ramp / (now * now)
            known = torch.maximum(planned, least).rsqrt() * left * (1.0 - fade + fade * fade / 3.0).rsqrt()
            return size * torch.where(steps > 0, known, torch.maximum(4.0 * now, least).rsqrt())
        least = ramp / (t * t)
        if steps <= 0:
            return size / math.sqrt(max(4.0 * t, least))
        left = 1.0 - fade * min((t - 0.5) / steps, 1.0)
        return size / math.sqrt(max(steps, least)) * left / math.sqrt(1.0 - fade + fade * fade / 3.0)


def weight_scale(tensors: Sequence[Tensor], shapes: Matrices) -> float:
    """w of these parameters, flat or not, whose rows and columns are ``shapes``.

    Vectors (biases, gains) count only if there is nothing else: gains begin at 1 and biases often at 0, whatever the
    network. All zeros have the size of torch's own initialisation, 1/√(3 columns).
    """
    both = list(zip(tensors, shapes, strict=True))
    chosen = [(t, shape) for t, shape in both if min(shape) > 1] or both
    n = sum(t.numel() for t, _ in chosen)
    if n == 0:
        raise bad("scale", None, "no weight is trained, so there is none to take it from", "Set requires_grad on some")
    squares = sum(float(t.detach().double().square().sum()) for t, _ in chosen)
    if squares == 0.0:
        squares = sum(t.numel() / (3.0 * columns) for t, (_, columns) in chosen)
    return math.sqrt(squares / n)


class CalmOptimizer(RuleOptimizer):
    """:class:`Calm` over all parameters of a model, and the Gaussian around where they are.

    >>> optimizer = CalmOptimizer(model.parameters(), lr=0.003, ess=len(train_set))

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: step size α.
        curvature: an estimator of a second moment, by name or as an object; None for the rule's own.
        **hyper: ``ess`` (N_ess, needed), ``temperature`` T, ``prior`` as for :class:`dpivon.IVON`, and the other
            hyperparameters of the rule.
    """

    rule: Calm
    kind: ClassVar[type[Calm]] = Calm

    def __init__(
        self, params: Any, *, lr: float, curvature: str | CurvatureEstimator | None = None, **hyper: Any
    ) -> None:
        rule = self.kind() if curvature is None else self.kind(resolve(curvature))
        super().__init__(params, rule, lr=lr, **hyper)

    def _update(self, group: dict[str, Any], params: list[Tensor], release: Release | None) -> None:
        if release is not None and release.batch_size is not None:
            group = {**group, "batch_size": release.batch_size}
        super()._update(group, params, release)

    @torch.no_grad()
    def posterior(self, model: nn.Module | None = None) -> Posterior:
        """N(m, diag T/(N_ess (h + δ))), named as by :meth:`dpivon.IVON.posterior`."""

        def width(p: Tensor, group: dict[str, Any]) -> Tensor:
            state = self._state(p, group)
            return variance(state["hess"], ess=group["ess"], weight_decay=damping(state, group)) * group["temperature"]

        return self._gaussian(model, width, method=self.rule.name, curvature=self.rule.estimator.name)


class SteadyOptimizer(CalmOptimizer):
    """:class:`Steady` over all parameters of a model.

    >>> optimizer = SteadyOptimizer(model.parameters(), steps=epochs * len(loader), ess=len(train_set))

    Args:
        params: parameters, named parameters, or parameter groups. w is of all of them, v̂ of each group by itself: the step
            goes in the direction of the gradient within a group, and is as long in each.
        lr: r, dimensionless.
        scale: w; by default that of the parameters as they are now.
        **hyper: ``ess`` (N_ess, needed), ``curvature``, ``steps`` T, ``ramp`` R, and the other hyperparameters of the rule.
    """

    kind: ClassVar[type[Calm]] = Steady

    def __init__(self, params: Any, *, lr: float = 3.5, scale: float | None = None, **hyper: Any) -> None:
        super().__init__(params, lr=lr, scale=1.0 if scale is None else scale, **hyper)
        if scale is None:
            everything = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
            own = weight_scale(everything, [matrix(p.shape) for p in everything])
            for group in self.param_groups:
                group["scale"] = own
