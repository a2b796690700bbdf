"""Simulated evidence for curvature estimators, and samples held against closed forms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dpivon.optim.curvature import Evidence, memory_of, remembered

S2 = 0.25  # variance of the privacy noise
RHO = 0.9


def phi(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def cdf(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def after(estimator: Any, gradients: Tensor, noise_variance: float = S2, **facts: Any) -> Evidence[Tensor]:
    """The evidence once the estimator has seen gradients [steps, K, rows, columns]."""
    memory = {name: torch.zeros_like(gradients[0]) for name in memory_of(estimator)}
    for t, g in enumerate(gradients, 1):
        settings = {
            "hess": torch.ones_like(g),
            "ess": 1.0,
            "weight_decay": 0.0,
            "decay": RHO,
            "batch_size": 1.0,
        } | facts
        evidence: Evidence[Tensor] = Evidence(
            g=g,
            g_squared=g.square(),
            g_perturbation=None,
            noise_variance=noise_variance,
            t=t,
            memory=memory,
            **settings,
        )
        evidence = remembered(estimator, evidence)
        memory = dict(evidence.memory)
    return evidence


def close(values: Tensor, mean: float, variance: float | None = None, errors: float = 4.0) -> None:
    """The sample agrees with the closed forms to a few of its own standard errors."""
    x = values.flatten()
    assert abs(float(x.mean()) - mean) < errors * float(x.std()) / math.sqrt(len(x))
    if variance is not None:
        squares = (x - x.mean()).square()
        assert abs(float(squares.mean()) - variance) < errors * float(squares.std()) / math.sqrt(len(x))


def squared_weights(decay: float, t: int) -> float:
    """Σ w_k² of a normalised average with decay ρ after t steps."""
    return (1 - decay) / (1 + decay) * (1 + decay**t) / (1 - decay**t)


def known(a: Tensor, error: float, steps: int = 20, decay: float = RHO) -> dict[str, Tensor]:
    """What an estimator remembers whose average is ``a`` with this standard error."""
    total = 1 - decay**steps
    return {"second": a * total, "fourth": torch.full_like(a, (error * total) ** 2 / 2)}
