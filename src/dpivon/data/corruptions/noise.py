"""Noise of the sensor, of the light and of the line. Severities count from 0 here."""

from __future__ import annotations

import torch
from torch import Tensor

STD = (0.04, 0.06, 0.08, 0.09, 0.10)
PHOTONS = (500, 250, 100, 75, 50)
SHARE = (0.01, 0.02, 0.03, 0.05, 0.07)


def gaussian_noise(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """N(0, s²) added to every value."""
    return x + STD[severity] * torch.randn(x.shape, generator=generator, device=x.device)


def shot_noise(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Poisson(c·x)/c: at most c photons a value."""
    return torch.poisson(x * PHOTONS[severity], generator) / PHOTONS[severity]


def impulse_noise(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """A share of all values becomes 0 or 1, each half the time."""
    draw = torch.rand(x.shape, generator=generator, device=x.device)
    share = SHARE[severity]
    return torch.where(draw < share / 2, 0.0, torch.where(draw < share, 1.0, x))
