"""Stochastic gradient descent with momentum, as ``torch.optim.SGD`` has it; on released gradients it is DP-SGD.

    d = g + λ m,   v ← μ v + d,   m ← m − α v        (Nesterov: m ← m − α (d + μ v))

Abadi et al., *Deep Learning with Differential Privacy*, 2016.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from dpivon.optim.rule import Hyper, full_like
from dpivon.optim.tensors import Values


@dataclass(frozen=True)
class SGDState(Generic[Values]):
    mean: Values
    velocity: Values


def sgd_update(
    state: SGDState[Values], g: Values, *, lr: Any, momentum: Any = 0.0, weight_decay: Any = 0.0, nesterov: Any = False
) -> SGDState[Values]:
    """One step. ``nesterov`` is 0 or 1; as a column it gives each row of a stack its own."""
    d = g + state.mean * weight_decay
    velocity = state.velocity * momentum + d
    if isinstance(nesterov, bool | float | int):
        step = d + velocity * momentum if nesterov else velocity
    else:
        step = d * nesterov + velocity * (momentum * nesterov + (1.0 - nesterov))
    return SGDState(mean=state.mean - step * lr, velocity=velocity)


@dataclass(frozen=True)
class SGD:
    """The rule."""

    name: ClassVar[str] = "sgd"
    defaults: ClassVar[Mapping[str, float]] = {"momentum": 0.9, "weight_decay": 1e-4, "nesterov": 0.0}
    draws: ClassVar[bool] = False

    def start(self, mean: Values, hyper: Hyper) -> dict[str, Values]:
        return {"mean": mean, "velocity": full_like(mean, 0.0)}

    def step(
        self, state: dict[str, Values], g: Values, *, t: Any, noise_variance: Any, normal: Values | None, hyper: Hyper
    ) -> dict[str, Values]:
        options = {key: hyper[key] for key in ("lr", *self.defaults)}
        new = sgd_update(SGDState(**state), g, **options)
        return {"mean": new.mean, "velocity": new.velocity}
