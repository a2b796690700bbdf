"""Blurs: one small kernel for every picture and channel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SIGMA = (0.4, 0.6, 0.7, 0.8, 1.0)
DISK = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))  # radius, σ of what smooths its edge


def bell(sigma: float, radius: int) -> Tensor:
    """A Gaussian on 2·radius + 1 points that sums to 1."""
    points = torch.arange(-radius, radius + 1, dtype=torch.float64)
    weights = torch.exp(-points.square() / (2 * sigma**2)) if sigma > 0 else (points == 0).double()
    return weights / weights.sum()


def disk(radius: float, smooth: float) -> Tensor:
    """Points within the radius, of equal weight, with an edge smoothed by a Gaussian of 3×3."""
    size = int(radius) + 1
    points = torch.arange(-size, size + 1, dtype=torch.float64)
    inside = (points[:, None].square() + points.square() <= radius**2).double()
    soft = bell(smooth, 1)
    return F.conv2d((inside / inside.sum())[None, None], torch.outer(soft, soft)[None, None], padding=1)[0, 0]


def filtered(x: Tensor, kernel: Tensor, border: str) -> Tensor:
    """Every channel of every picture under one kernel; ``border`` is torch's word for what lies outside."""
    n, channels, height, width = x.shape
    around = kernel.shape[0] // 2
    wide = F.pad(x, (around,) * 4, mode=border).reshape(n * channels, 1, height + 2 * around, width + 2 * around)
    return F.conv2d(wide, kernel.to(x)[None, None]).reshape(x.shape)


def gaussian_blur(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    sigma = SIGMA[severity]
    weights = bell(sigma, int(4 * sigma + 0.5))
    return filtered(x, torch.outer(weights, weights), "replicate")


def defocus_blur(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """A point becomes a small disk."""
    return filtered(x, disk(*DISK[severity]), "reflect")
