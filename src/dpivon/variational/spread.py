"""The coordinate in which a posterior's standard deviation is trained: a softplus, in units of the mean.

    σ(r) = σ₀ softplus(κ + a r / σ₀),   softplus(κ) = 1,   a = e / (√2 (e − 1)),   so σ(0) = σ₀ and σ′(0) = 1/√2

Clipping and privacy noise treat all coordinates alike: one bound on the joint gradient of mean and spread, the same noise in
each. That makes sense only if a step of a given length means about as much in one as in the other. For N(μ, σ²) the Fisher
information is 1/σ² in μ and 2/σ² in σ; with σ′(0) = 1/√2 it is 1/σ₀² in μ and in r alike, so that at the start a step moves
the posterior equally far, whichever coordinate it goes along. In Blundell's own ρ, σ = softplus(ρ), the spread's gradient is
smaller than the mean's by about the factor σ: after clipping it would drown in the noise.

Above σ₀ the width grows no faster than a r, so noise that random-walks in r cannot make σ explode, as σ = exp(ρ) would.
Blundell et al., *Weight Uncertainty in Neural Networks*, 2015.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

_KAPPA = math.log(math.e - 1.0)
_A = math.e / (math.sqrt(2.0) * (math.e - 1.0))


def std(r: Tensor, std0: float) -> Tensor:
    """σ(r)."""
    return F.softplus(r * (_A / std0) + _KAPPA) * std0


def std_slope(r: Tensor, std0: float) -> Tensor:
    """σ′(r)."""
    return (r * (_A / std0) + _KAPPA).sigmoid() * _A


def variance(r: Tensor, std0: float) -> Tensor:
    """σ²(r)."""
    return std(r, std0).square()


def variance_slope(r: Tensor, std0: float) -> Tensor:
    """dσ²/dr = 2 σ σ′."""
    return std(r, std0) * std_slope(r, std0) * 2.0
