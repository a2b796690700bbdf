"""Stochastic gradient descent with momentum, as ``torch.optim.SGD`` has it; on released gradients it is DP-SGD.

    d = g + λ m,   v ← μ v + d,   m ← m − α v        (Nesterov: m ← m − α (d + μ v))

Abadi et al., *Deep Learning with Differential Privacy*, 2016.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from dpivon.optim.tensors import Values


@dataclass(frozen=True)
class SGDState(Generic[Values]):
    mean: Values
    velocity: Values


def sgd_update(
    state: SGDState[Values], g: Values, *, lr: Any, momentum: Any = 0.0, weight_decay: Any = 0.0, nesterov: bool = False
) -> SGDState[Values]:
    d = g + state.mean * weight_decay
    velocity = state.velocity * momentum + d
    step = d + velocity * momentum if nesterov else velocity
    return SGDState(mean=state.mean - step * lr, velocity=velocity)
