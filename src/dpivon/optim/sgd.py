"""Stochastic gradient descent with momentum, as ``torch.optim.SGD`` has it; on released gradients it is DP-SGD.

    d = g + λ m,   v ← μ v + d,   m ← m − α v        (Nesterov: m ← m − α (d + μ v))

Abadi et al., *Deep Learning with Differential Privacy*, 2016.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dpivon.optim.rule import Hyper, full_like
from dpivon.optim.tensors import Values


@dataclass(frozen=True)
class SGD:
    """The rule. ``nesterov`` is 0 or 1; as a column it gives each row of a stack its own."""

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
