"""Adam, as ``torch.optim.Adam`` has it, and AdamW; on released gradients they are DP-Adam and DP-AdamW.

    d = g + λ m,   s ← β₁ s + (1 − β₁) d,   v ← β₂ v + (1 − β₂) d²,   m ← m − α ŝ / (√v̂ + ν)

with ŝ = s/(1 − β₁ᵗ) and v̂ = v/(1 − β₂ᵗ). AdamW takes the decay out of the moments: d = g, and m ← (1 − αλ) m first.
Kingma and Ba, 2015; Loshchilov and Hutter, 2019; privately in Zhou et al., 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dpivon.optim.rule import Hyper, debias, full_like
from dpivon.optim.tensors import Values


@dataclass(frozen=True)
class Adam:
    """The rule."""

    name: ClassVar[str] = "adam"
    defaults: ClassVar[Mapping[str, float]] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-4}
    draws: ClassVar[bool] = False
    decoupled: ClassVar[bool] = False

    def start(self, mean: Values, hyper: Hyper) -> dict[str, Values]:
        return {"mean": mean, "momentum": full_like(mean, 0.0), "second": full_like(mean, 0.0)}

    def step(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, normal: Values | None, hyper: Hyper
    ) -> dict[str, Values]:
        mean, lr, weight_decay, beta1, beta2 = (
            state["mean"],
            *(hyper[k] for k in ("lr", "weight_decay", "beta1", "beta2")),
        )
        mean, d = (mean * (1.0 - lr * weight_decay), g) if self.decoupled else (mean, g + mean * weight_decay)
        momentum = state["momentum"] * beta1 + d * (1.0 - beta1)
        second = state["second"] * beta2 + d.square() * (1.0 - beta2)
        step = (momentum / debias(beta1, t)) / ((second / debias(beta2, t)).sqrt() + hyper["eps"])
        return {"mean": mean - step * lr, "momentum": momentum, "second": second}


@dataclass(frozen=True)
class AdamW(Adam):
    """The rule with decoupled weight decay; its default is torch's."""

    name: ClassVar[str] = "adamw"
    defaults: ClassVar[Mapping[str, float]] = {**Adam.defaults, "weight_decay": 1e-2}
    decoupled: ClassVar[bool] = True
