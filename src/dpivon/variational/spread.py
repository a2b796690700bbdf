"""The coordinate in which a posterior's standard deviation is trained: Blundell's softplus, in units of the initial width.

    σ(r) = σ₀ softplus(κ + a r),   softplus(κ) = 1,   a = c e/(e − 1),   so that σ(0) = σ₀ and σ′(0) = c σ₀

Clipping and privacy noise treat all coordinates alike: one bound on the joint gradient of mean and spread, the same noise in
each. So the unit of r decides two things. By the chain rule the spread's gradient is about c σ₀ times the mean's: with
c σ₀ ≪ 1 the joint bound is spent on the mean, whose gradient carries the signal. And noise that moves r by d changes σ by the
fraction c d, whatever σ₀ is. Fisher's metric would call for c σ₀ = 1/√2, where a step along r moves the posterior as far as one
along μ; but under privacy the means wander by many σ₀, and widths that wander as far, and cannot be negative, can only grow: on
the digits of the demo (ε = 4, T = .01, one seed) accuracy then was .79 where it is .93. Growth is linear in r, so that noise
cannot make σ explode, as σ = exp(r) would.

Blundell et al., *Weight Uncertainty in Neural Networks*, 2015 (there σ = softplus(ρ), so c = 1 for small σ₀).
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

#: c, the relative slope σ′(0)/σ₀.
RATE = 2.0
_KAPPA = math.log(math.e - 1.0)
_A = RATE * math.e / (math.e - 1.0)


def std(r: Tensor, std0: float) -> Tensor:
    """σ(r)."""
    return F.softplus(r * _A + _KAPPA) * std0


def std_slope(r: Tensor, std0: float) -> Tensor:
    """σ′(r)."""
    return (r * _A + _KAPPA).sigmoid() * (_A * std0)


def variance(r: Tensor, std0: float) -> Tensor:
    """σ²(r)."""
    return std(r, std0).square()


def variance_slope(r: Tensor, std0: float) -> Tensor:
    """dσ²/dr = 2 σ σ′."""
    return std(r, std0) * std_slope(r, std0) * 2.0
