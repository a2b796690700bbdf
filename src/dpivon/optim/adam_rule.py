"""Adam, as ``torch.optim.Adam`` has it; on released gradients it is DP-Adam.

    d = g + λ m,   s ← β₁ s + (1 − β₁) d,   v ← β₂ v + (1 − β₂) d²,   m ← m − α ŝ / (√v̂ + ν)

with ŝ = s/(1 − β₁ᵗ) and v̂ = v/(1 − β₂ᵗ). Kingma and Ba, 2015; privately in Zhou et al., 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from dpivon.optim.tensors import Values


@dataclass(frozen=True)
class AdamState(Generic[Values]):
    mean: Values
    momentum: Values
    second: Values


def adam_update(
    state: AdamState[Values],
    g: Values,
    *,
    lr: Any,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    debias1: Any = 1.0,
    debias2: Any = 1.0,
) -> AdamState[Values]:
    """One step. ``debias1`` and ``debias2`` are 1 − β₁ᵗ and 1 − β₂ᵗ."""
    d = g + state.mean * weight_decay
    momentum = state.momentum * beta1 + d * (1.0 - beta1)
    second = state.second * beta2 + d.square() * (1.0 - beta2)
    step = (momentum / debias1) / ((second / debias2).sqrt() + eps)
    return AdamState(mean=state.mean - step * lr, momentum=momentum, second=second)
