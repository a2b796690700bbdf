"""Rules that train a point: SGD and Adam as torch has them, and DPAGD, the general private adaptive step (Zhou et al., 2020).

    m_t = φ_t(g_1, …, g_t),   v_t = min(ψ_t(g_1, …, g_t), λ),   θ ← θ − α m_t / (√v_t + ν)

with g_t the released gradients (after L2 decay: g_t + λ_w θ). The cap λ keeps the step from vanishing: at least
α m_t / (√λ + ν). Its members are choices of φ and ψ, pure recursions over
values that were already released (:class:`Moment`):

    DP-SGD       φ = g or Σ μᵗ⁻ᵏ g_k     ψ = 1, ν = 0
    DP-AdaGrad   φ = g                   ψ = Σ g_k²
    DP-RMSProp   φ = g                   ψ = average of g_k²
    DP-Adam      φ = debiased average    ψ = debiased average of g_k²
    DP-AdamBC    φ = debiased average    ψ = max(debiased average of g_k² − s², γ, κ s²), ν = 0

Zhou, Chen, Hong, Wu, Banerjee: *Private Stochastic Non-Convex Optimization: Adaptive Algorithms and Tighter
Generalization Bounds*, 2020. AdamBC: Tang, Shpilevskiy, Lécuyer, *DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You
Apply Bias Correction)*, 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpivon.optim.rule import Hyper, debias, full_like
from dpivon.optim.tensors import Values


@dataclass(frozen=True)
class Moment:
    """φ or ψ: a recursion over released gradients.

    Args:
        name: what ``phi=`` and ``psi=`` take.
        update: ``update(state, g, t=, noise_variance=, hyper=)`` returns the value at step t and what step t + 1 needs.
        defaults: of the hyperparameters that it reads.
        keeps: the tensors that it remembers, which begin at zero; φ and ψ keep theirs under different keys.
    """

    name: str
    update: Callable[..., Any]
    defaults: Mapping[str, float] = field(default_factory=dict)
    keeps: tuple[str, ...] = ()


# ---- φ


def gradient(state: dict[str, Values], g: Values, **step: Any) -> tuple[Values, dict[str, Values]]:
    """φ_t = g_t."""
    return g, {}


def heavy_ball(state: dict[str, Values], g: Values, *, hyper: Hyper, **step: Any) -> tuple[Values, dict[str, Values]]:
    """φ_t = μ φ_{t−1} + g_t: SGD's momentum, which sums."""
    velocity = state["velocity"] * hyper["momentum"] + g
    return velocity, {"velocity": velocity}


def average(
    state: dict[str, Values], g: Values, *, t: Any, hyper: Hyper, **step: Any
) -> tuple[Values, dict[str, Values]]:
    """φ_t = s_t / (1 − β₁ᵗ) with s_t = β₁ s_{t−1} + (1 − β₁) g_t: Adam's momentum, and IVON's s̄."""
    beta1 = hyper["beta1"]
    momentum = state["momentum"] * beta1 + g * (1.0 - beta1)
    return momentum / debias(beta1, t), {"momentum": momentum}


# ---- ψ


def one(state: dict[str, Values], g: Values, **step: Any) -> tuple[Values, dict[str, Values]]:
    """ψ_t = 1: no adaptation."""
    return full_like(g, 1.0), {}


def raw_square_average(
    state: dict[str, Values], g: Values, *, hyper: Hyper, **step: Any
) -> tuple[Values, dict[str, Values]]:
    """ψ_t = v_t with v_t = β₂ v_{t−1} + (1 − β₂) g_t²: RMSProp."""
    second = state["second"] * hyper["beta2"] + g.square() * (1.0 - hyper["beta2"])
    return second, {"second": second}


def square_average(
    state: dict[str, Values], g: Values, *, t: Any, hyper: Hyper, **step: Any
) -> tuple[Values, dict[str, Values]]:
    """The same, divided by 1 − β₂ᵗ: Adam."""
    second, kept = raw_square_average(state, g, hyper=hyper)
    return second / debias(hyper["beta2"], t), kept


def square_sum(state: dict[str, Values], g: Values, **step: Any) -> tuple[Values, dict[str, Values]]:
    """ψ_t = Σ_{k≤t} g_k²: AdaGrad. Every step adds the noise's variance to it, so steps shrink as 1/√t at the least."""
    total = state["total"] + g.square()
    return total, {"total": total}


def corrected(
    state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, hyper: Hyper
) -> tuple[Values, dict[str, Values]]:
    """ψ_t = max(v̂_t − s², γ, κ s²) with v̂_t as in Adam and s² the variance of the noise in the gradients: DP-AdamBC.

    Since E[g_dp²] = E[ḡ²] + s², Adam's v̂ is unbiased for a second moment that the noise dominates; here its expectation is
    taken off. Unlike the curvature of DP-IVON-Gradsq, which projects each g² − s² before averaging, this projects the
    average: at zero signal E[v̂] − s² = 0, where projected squares have mean 0.484 s².

    The published rule has κ = 0 and a γ tuned for the task. Where there is no signal v̂ − s² is its own error, of standard
    deviation s² √(2(1 − β₂)/(1 + β₂)) ≈ 0.032 s² at β₂ = .999, and a γ far below that turns it into steps of m̂/√γ.
    κ (``relative_floor``) states the floor in units of the noise: by default three standard errors on every task.

    s² is averaged with the same weights as g², so that a noise multiplier changed by a schedule is corrected exactly.
    """
    beta2 = hyper["beta2"]
    # Averaging g² − s² is averaging both with the same weights; the projection comes after.
    second = state["second"] * beta2 + (g.square() - noise_variance) * (1.0 - beta2)
    floor, relative = hyper["floor"], hyper["relative_floor"] * noise_variance
    least = torch.maximum(floor, relative) if isinstance(floor, Tensor) else max(floor, relative)
    return (second / debias(beta2, t)).clamp(min=least), {"second": second}


GRADIENT = Moment("gradient", gradient)
AVERAGE = Moment("average", average, {"beta1": 0.9}, ("momentum",))
SQUARE_AVERAGE = Moment("square-average", square_average, {"beta2": 0.999}, ("second",))
RAW_SQUARE_AVERAGE = Moment("raw-square-average", raw_square_average, {"beta2": 0.999}, ("second",))
SQUARE_SUM = Moment("square-sum", square_sum, keeps=("total",))
CORRECTED = Moment("corrected", corrected, {"beta2": 0.999, "floor": 1e-8, "relative_floor": 0.1}, ("second",))
_PHI = (GRADIENT, Moment("momentum", heavy_ball, {"momentum": 0.9}, ("velocity",)), AVERAGE)
_PSI = (Moment("one", one), SQUARE_AVERAGE, RAW_SQUARE_AVERAGE, SQUARE_SUM, CORRECTED)
PHI, PSI = ({m.name: m for m in moments} for moments in (_PHI, _PSI))


# ---- the rule


def dpagd_step(theta: Values, phi: Values, psi: Values, *, lr: Any, nu: Any = 0.0, cap: Any = math.inf) -> Values:
    """θ − α φ / (√min(ψ, λ) + ν)."""
    return theta - phi / (psi.clamp(max=cap).sqrt() + nu) * lr


@dataclass(frozen=True)
class DPAGD:
    """The rule, for any φ and ψ. ``own`` are defaults that differ from those of φ and ψ."""

    phi: Moment = AVERAGE
    psi: Moment = SQUARE_AVERAGE
    name: str = "dpagd"
    own: Mapping[str, float] = field(default_factory=dict)

    draws: ClassVar[bool] = False

    @property
    def defaults(self) -> Mapping[str, float]:
        common = {"nu": 1e-8, "cap": math.inf, "weight_decay": 1e-4}
        return {**self.phi.defaults, **self.psi.defaults, **common, **self.own}

    def start(self, mean: Values, hyper: Hyper) -> dict[str, Values]:
        return {"mean": mean, **{name: full_like(mean, 0.0) for name in (*self.phi.keeps, *self.psi.keeps)}}

    def step(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, normal: Values | None, hyper: Hyper
    ) -> dict[str, Values]:
        mean = state["mean"]
        d = g + mean * hyper["weight_decay"]
        phi, phi_state = self.phi.update(state, d, t=t, noise_variance=noise_variance, hyper=hyper)
        psi, psi_state = self.psi.update(state, d, t=t, noise_variance=noise_variance, hyper=hyper)
        mean = dpagd_step(mean, phi, psi, lr=hyper["lr"], nu=hyper["nu"], cap=hyper["cap"])
        return {"mean": mean, **phi_state, **psi_state}


#: RMSProp as ``torch.optim.RMSprop`` has it: its v starts at 0 and is not debiased.
RMSPROP = DPAGD(GRADIENT, RAW_SQUARE_AVERAGE, "rmsprop", {"beta2": 0.99})
#: AdaGrad as ``torch.optim.Adagrad`` has it.
ADAGRAD = DPAGD(GRADIENT, SQUARE_SUM, "adagrad", {"nu": 1e-10})
ADAMBC = DPAGD(AVERAGE, CORRECTED, "adambc", {"nu": 0.0})


@dataclass(frozen=True)
class SGD:
    """SGD with momentum, as ``torch.optim.SGD`` has it; on released gradients it is DP-SGD (Abadi et al., 2016).

        d = g + λ m,   v ← μ v + d,   m ← m − α v        (Nesterov: m ← m − α (d + μ v))

    ``nesterov`` is 0 or 1; as a column it gives each row of a stack its own.
    """

    name: ClassVar[str] = "sgd"
    defaults: ClassVar[Mapping[str, float]] = {"momentum": 0.9, "weight_decay": 1e-4, "nesterov": 0.0}
    draws: ClassVar[bool] = False

    def start(self, mean: Values, hyper: Hyper) -> dict[str, Values]:
        return {"mean": mean, "velocity": full_like(mean, 0.0)}

    def step(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, normal: Values | None, hyper: Hyper
    ) -> dict[str, Values]:
        mean, momentum, nesterov = state["mean"], hyper["momentum"], hyper["nesterov"]
        d = g + mean * hyper["weight_decay"]
        velocity = state["velocity"] * momentum + d
        if isinstance(nesterov, bool | float | int):
            step = d + velocity * momentum if nesterov else velocity
        else:
            step = d * nesterov + velocity * (momentum * nesterov + (1.0 - nesterov))
        return {"mean": mean - step * hyper["lr"], "velocity": velocity}


@dataclass(frozen=True)
class Adam:
    """As ``torch.optim.Adam`` has it (Kingma and Ba, 2015); on released gradients it is DP-Adam (Zhou et al., 2020).

        d = g + λ m,   s ← β₁ s + (1 − β₁) d,   v ← β₂ v + (1 − β₂) d²,   m ← m − α ŝ / (√v̂ + ν)

    with ŝ = s/(1 − β₁ᵗ) and v̂ = v/(1 − β₂ᵗ).
    """

    name: ClassVar[str] = "adam"
    defaults: ClassVar[Mapping[str, float]] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-4}
    draws: ClassVar[bool] = False
    decoupled: ClassVar[bool] = False

    def start(self, mean: Values, hyper: Hyper) -> dict[str, Values]:
        return {"mean": mean, "momentum": full_like(mean, 0.0), "second": full_like(mean, 0.0)}

    def step(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, normal: Values | None, hyper: Hyper
    ) -> dict[str, Values]:
        mean, lr, weight_decay = state["mean"], hyper["lr"], hyper["weight_decay"]
        mean, d = (mean * (1.0 - lr * weight_decay), g) if self.decoupled else (mean, g + mean * weight_decay)
        phi, momentum = average(state, d, t=t, hyper=hyper)
        psi, second = square_average(state, d, t=t, hyper=hyper)
        return {"mean": mean - phi / (psi.sqrt() + hyper["eps"]) * lr, **momentum, **second}


@dataclass(frozen=True)
class AdamW(Adam):
    """Decay out of the moments (Loshchilov and Hutter, 2019): d = g, and m ← (1 − αλ) m first; its default is torch's."""

    name: ClassVar[str] = "adamw"
    defaults: ClassVar[Mapping[str, float]] = {**Adam.defaults, "weight_decay": 1e-2}
    decoupled: ClassVar[bool] = True
