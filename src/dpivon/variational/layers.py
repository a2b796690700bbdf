"""Layers whose weights are Gaussian, W ~ N(M, diag σ²), by local reparameterisation.

    z = M x + b + √(σ² x² + σ_b²) ⊙ ε,   ε ~ N(0, I), one for every row and output

A linear layer's output is Gaussian given its input, so the noise can be drawn where it matters: in the output. Every example
then has a draw of its own, rows stay independent, and the gradient has less variance than one W for the whole batch would give
(Kingma, Salimans and Welling, *Variational Dropout and the Local Reparameterization Trick*, 2015). Where a weight is used at
several positions of one example (convolutions, sequences) each position gets its own ε: every output's distribution is right,
the correlation between positions that share W is left out, as is usual for Bayesian convolutions. Prediction draws weights.

The two parts are layers of their own, ``mean`` and ``spread``, and the noise stands outside both: what holds parameters is
deterministic, so per-example gradients are of exactly the pass that was made.

Standard deviations are trained in a coordinate r, Blundell's softplus (2015) in units of the initial width:

    σ(r) = σ₀ softplus(κ + a r),   softplus(κ) = 1,   a = c e/(e − 1),   so that σ(0) = σ₀ and σ′(0) = c σ₀

Clipping and privacy noise treat all coordinates alike, so the unit of r matters. The spread's gradient is about c σ₀ times the
mean's: with c σ₀ ≪ 1 the joint bound is spent on the mean, which carries the signal. Noise that moves r by d changes σ by the
fraction c d, whatever σ₀ is. Growth is linear in r, so that noise cannot make σ explode, as σ = exp(r) would.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: c, the relative slope σ′(0)/σ₀.
RATE = 2.0
_KAPPA = math.log(math.e - 1.0)
_A = RATE * math.e / (math.e - 1.0)
#: Added to an output's variance: √ has no slope at 0, where an input of zeros without a bias would put it.
_TINY = 1e-16


def std(r: Tensor, std0: float) -> Tensor:
    """σ(r)."""
    return F.softplus(r * _A + _KAPPA) * std0


def std_slope(r: Tensor, std0: float) -> Tensor:
    """σ′(r)."""
    return (r * _A + _KAPPA).sigmoid() * (_A * std0)


def variance_slope(r: Tensor, std0: float) -> Tensor:
    """dσ²/dr = 2 σ σ′."""
    return std(r, std0) * std_slope(r, std0) * 2.0


class Spread(nn.Module):
    """The variance of a Gaussian layer's output: the layer on x² with the weights' variances. ``weight`` and ``bias`` are r."""

    initial_std: float
    weight: Any
    bias: Any

    def start(self, initial_std: float) -> None:
        """Every weight gets the standard deviation σ₀."""
        self.initial_std = initial_std
        with torch.no_grad():
            for r in self.parameters():
                r.zero_()

    def std(self) -> dict[str, Tensor]:
        """σ of every parameter that has one, under the name that it has in the layer."""
        return {name: std(r, self.initial_std) for name, r in self.named_parameters()}

    def variances(self) -> tuple[Tensor, Tensor | None]:
        bias = None if self.bias is None else std(self.bias, self.initial_std).square()
        return std(self.weight, self.initial_std).square(), bias

    def get_extra_state(self) -> Tensor:
        """σ₀ travels with the state: r means nothing without it."""
        return torch.tensor(self.initial_std, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.initial_std = float(state)


class SpreadLinear(Spread, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.square(), *self.variances())


class _SpreadConv(Spread):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x.square(), *self.variances())  # type: ignore[operator]


class SpreadConv1d(_SpreadConv, nn.Conv1d): ...


class SpreadConv2d(_SpreadConv, nn.Conv2d): ...


class SpreadConv3d(_SpreadConv, nn.Conv3d): ...


#: The layers that can be made Gaussian, and their spreads. Exactly these: a subclass may do something else.
SPREADS: dict[type[nn.Module], type[Spread]] = {
    nn.Linear: SpreadLinear,
    nn.Conv1d: SpreadConv1d,
    nn.Conv2d: SpreadConv2d,
    nn.Conv3d: SpreadConv3d,
}


class Variational(nn.Module):
    """A layer with Gaussian weights: ``mean`` is the layer it was, with M and b; ``spread`` holds the standard deviations.

    In training mode the output is a draw, in eval mode it is the one at the mean weights.
    """

    def __init__(self, layer: nn.Module, initial_std: float) -> None:
        super().__init__()
        self.mean = layer
        self.spread = _spread_like(layer, initial_std)
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        m: Tensor = self.mean(x)
        if not self.training:
            return m
        v: Tensor = self.spread(x)
        return m + (v + _TINY).sqrt() * self.noise(v)

    def noise(self, v: Tensor) -> Tensor:
        """ε, independent for every row and output. Not privacy noise, and never counted as such."""
        return torch.randn_like(v)

    @property
    def weight(self) -> Tensor:
        """M, for code that looks at a layer's weight."""
        return cast(Tensor, self.mean.weight)

    @property
    def bias(self) -> Tensor | None:
        return cast("Tensor | None", self.mean.bias)


def _spread_like(layer: nn.Module, initial_std: float) -> Spread:
    """A spread for the layer's weight, and for its bias if that is trained."""
    make = SPREADS[type(layer)]
    bias = layer.bias is not None and layer.bias.requires_grad
    like = {"bias": bias, "device": layer.weight.device, "dtype": layer.weight.dtype}
    if isinstance(layer, nn.Linear):
        spread = make(layer.in_features, layer.out_features, **like)
    else:
        shape = [
            "in_channels",
            "out_channels",
            "kernel_size",
            "stride",
            "padding",
            "dilation",
            "groups",
            "padding_mode",
        ]
        spread = make(**{name: getattr(layer, name) for name in shape}, **like)
    spread.start(initial_std)
    return spread
