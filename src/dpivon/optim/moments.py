"""φ_t and ψ_t: what a private adaptive step remembers of the released gradients g_1, …, g_t.

φ_t is the direction and ψ_t the scale of :mod:`dpivon.optim.dpagd_rule`. Each is a pure recursion over values that were
already released, and reads nothing else. A new one is a frozen dataclass with the four members of :class:`Moment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dpivon.optim.rule import Hyper, debias, full_like
from dpivon.optim.tensors import Values


class Moment(Protocol):
    """``update`` returns the value at step t and the state that step t + 1 needs; φ and ψ keep theirs under different keys."""

    @property
    def name(self) -> str: ...

    @property
    def defaults(self) -> Mapping[str, float]: ...

    def start(self, like: Values, hyper: Hyper) -> dict[str, Values]: ...

    def update(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, hyper: Hyper
    ) -> tuple[Values, dict[str, Values]]: ...


# ---- φ


@dataclass(frozen=True)
class Gradient:
    """φ_t = g_t."""

    name: ClassVar[str] = "gradient"
    defaults: ClassVar[Mapping[str, float]] = {}

    def start(self, like: Values, hyper: Hyper) -> dict[str, Values]:
        return {}

    def update(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, hyper: Hyper
    ) -> tuple[Values, dict[str, Values]]:
        return g, {}


@dataclass(frozen=True)
class HeavyBall:
    """φ_t = μ φ_{t−1} + g_t: SGD's momentum, which sums."""

    name: ClassVar[str] = "momentum"
    defaults: ClassVar[Mapping[str, float]] = {"momentum": 0.9}

    def start(self, like: Values, hyper: Hyper) -> dict[str, Values]:
        return {"velocity": full_like(like, 0.0)}

    def update(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, hyper: Hyper
    ) -> tuple[Values, dict[str, Values]]:
        velocity = state["velocity"] * hyper["momentum"] + g
        return velocity, {"velocity": velocity}


@dataclass(frozen=True)
class Average:
    """φ_t = s_t / (1 − β₁ᵗ) with s_t = β₁ s_{t−1} + (1 − β₁) g_t: Adam's momentum, and IVON's s̄."""

    name: ClassVar[str] = "average"
    defaults: ClassVar[Mapping[str, float]] = {"beta1": 0.9}

    def start(self, like: Values, hyper: Hyper) -> dict[str, Values]:
        return {"momentum": full_like(like, 0.0)}

    def update(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, hyper: Hyper
    ) -> tuple[Values, dict[str, Values]]:
        beta1 = hyper["beta1"]
        momentum = state["momentum"] * beta1 + g * (1.0 - beta1)
        return momentum / debias(beta1, t), {"momentum": momentum}


# ---- ψ


@dataclass(frozen=True)
class One:
    """ψ_t = 1: no adaptation."""

    name: ClassVar[str] = "one"
    defaults: ClassVar[Mapping[str, float]] = {}

    def start(self, like: Values, hyper: Hyper) -> dict[str, Values]:
        return {}

    def update(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, hyper: Hyper
    ) -> tuple[Values, dict[str, Values]]:
        return full_like(g, 1.0), {}


@dataclass(frozen=True)
class SquareAverage:
    """ψ_t = v_t with v_t = β₂ v_{t−1} + (1 − β₂) g_t² (RMSProp); divided by 1 − β₂ᵗ if ``debiased`` (Adam)."""

    debiased: bool = True

    defaults: ClassVar[Mapping[str, float]] = {"beta2": 0.999}

    @property
    def name(self) -> str:
        return "square-average" if self.debiased else "raw-square-average"

    def start(self, like: Values, hyper: Hyper) -> dict[str, Values]:
        return {"second": full_like(like, 0.0)}

    def update(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, hyper: Hyper
    ) -> tuple[Values, dict[str, Values]]:
        beta2 = hyper["beta2"]
        second = state["second"] * beta2 + g.square() * (1.0 - beta2)
        return second / debias(beta2, t) if self.debiased else second, {"second": second}


@dataclass(frozen=True)
class SquareSum:
    """ψ_t = Σ_{k≤t} g_k²: AdaGrad. Every step adds the noise's variance to it, so steps shrink as 1/√t at the least."""

    name: ClassVar[str] = "square-sum"
    defaults: ClassVar[Mapping[str, float]] = {}

    def start(self, like: Values, hyper: Hyper) -> dict[str, Values]:
        return {"total": full_like(like, 0.0)}

    def update(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, hyper: Hyper
    ) -> tuple[Values, dict[str, Values]]:
        total = state["total"] + g.square()
        return total, {"total": total}


@dataclass(frozen=True)
class CorrectedSquareAverage:
    """ψ_t = max(v̂_t − s², γ, κ s²) with v̂_t as in Adam and s² the variance of the noise in the gradients: DP-AdamBC.

    Since E[g_dp²] = E[ḡ²] + s², Adam's v̂ is unbiased for a second moment that the noise dominates; here its expectation is
    taken off. Unlike the curvature of DP-IVON-Gradsq, which projects each g² − s² before averaging, this projects the
    average: at zero signal E[v̂] − s² = 0, where projected squares have mean 0.484 s².

    The published rule has κ = 0 and a γ tuned for the task. Where there is no signal v̂ − s² is its own error, of standard
    deviation s² √(2(1 − β₂)/(1 + β₂)) ≈ 0.032 s² at β₂ = .999, and a γ far below that turns it into steps of m̂/√γ: with
    γ = 1e-8 and the demonstration's three learning rates 65 % of the validation digits at best, with κ = 0.1 96 %.
    κ (``relative_floor``) states the floor in units of the noise: by default three standard errors on every task.

    s² is averaged with the same weights as g², so that a noise multiplier changed by a schedule is corrected exactly.
    """

    name: ClassVar[str] = "corrected"
    defaults: ClassVar[Mapping[str, float]] = {"beta2": 0.999, "floor": 1e-8, "relative_floor": 0.1}

    def start(self, like: Values, hyper: Hyper) -> dict[str, Values]:
        return {"second": full_like(like, 0.0)}

    def update(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, hyper: Hyper
    ) -> tuple[Values, dict[str, Values]]:
        beta2 = hyper["beta2"]
        # Averaging g² − s² is averaging both with the same weights; the projection comes after.
        second = state["second"] * beta2 + (g.square() - noise_variance) * (1.0 - beta2)
        least = _larger(hyper["floor"], hyper["relative_floor"] * noise_variance)
        return (second / debias(beta2, t)).clamp(min=least), {"second": second}


def _larger(a: Any, b: Any) -> Any:
    return torch.maximum(a, b) if isinstance(a, Tensor) else max(a, b)


PHI: dict[str, Moment] = {m.name: m for m in (Gradient(), HeavyBall(), Average())}
PSI: dict[str, Moment] = {
    m.name: m for m in (One(), SquareAverage(), SquareAverage(False), SquareSum(), CorrectedSquareAverage())
}
