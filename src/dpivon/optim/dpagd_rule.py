"""The general private adaptive step, DPAGD (Zhou et al., 2020), in the paper's symbols.

    m_t = φ_t(g_1, …, g_t),   v_t = min(ψ_t(g_1, …, g_t), λ),   θ ← θ − α m_t / (√v_t + ν)

with g_t the released gradients (after L2 decay: g_t + λ_w θ). The cap λ keeps the step from vanishing: at least
α m_t / (√λ + ν). Its members are choices of φ and ψ (:mod:`dpivon.optim.moments`):

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dpivon.optim.moments import Average, CorrectedSquareAverage, Gradient, Moment, SquareAverage, SquareSum
from dpivon.optim.rule import Hyper
from dpivon.optim.tensors import Values


def dpagd_step(theta: Values, phi: Values, psi: Values, *, lr: Any, nu: Any = 0.0, cap: Any = math.inf) -> Values:
    """θ − α φ / (√min(ψ, λ) + ν)."""
    return theta - phi / (psi.clamp(max=cap).sqrt() + nu) * lr


@dataclass(frozen=True)
class DPAGD:
    """The rule, for any φ and ψ. ``own`` are defaults that differ from those of φ and ψ."""

    phi: Moment = field(default_factory=Average)
    psi: Moment = field(default_factory=SquareAverage)
    name: str = "dpagd"
    own: Mapping[str, float] = field(default_factory=dict)

    draws: ClassVar[bool] = False

    @property
    def defaults(self) -> Mapping[str, float]:
        common = {"nu": 1e-8, "cap": math.inf, "weight_decay": 1e-4}
        return {**self.phi.defaults, **self.psi.defaults, **common, **self.own}

    def start(self, mean: Values, hyper: Hyper) -> dict[str, Values]:
        return {"mean": mean, **self.phi.start(mean, hyper), **self.psi.start(mean, hyper)}

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
RMSPROP = DPAGD(Gradient(), SquareAverage(debiased=False), "rmsprop", {"beta2": 0.99})
#: AdaGrad as ``torch.optim.Adagrad`` has it.
ADAGRAD = DPAGD(Gradient(), SquareSum(), "adagrad", {"nu": 1e-10})
ADAMBC = DPAGD(Average(), CorrectedSquareAverage(), "adambc", {"nu": 0.0})
