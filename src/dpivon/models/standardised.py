"""Convolutions with standardised weights (Qiao et al., *Micro-Batch Training with Batch-Channel Normalization and Weight
Standardization*, 2019), which private training of residual networks profits from (De et al., 2022)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FLOOR = 1e-4  # of ‖c‖², as in De et al.: below it a row is divided by a constant


class StandardisedConv2d(nn.Conv2d):
    """A convolution with ŵ = c/‖c‖, c = w − mean(w), for the weights of every output channel.

    Standardised means mean 0 and variance 1/fan-in. The scale is left to the normalisation that follows; there is no gain.
    """

    def standardised(self) -> Tensor:
        centred, _, scale = centred_rows(self.weight)
        return (centred * scale).view_as(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.standardised(), self.bias)

    def pull_back(self, g: Tensor) -> Tensor:
        """From gradients in ŵ, [..., out, in, kernel, kernel], to gradients in w."""
        return pull_back(self.weight.detach(), g)


def directions(weight: Tensor) -> tuple[Tensor, Tensor]:
    """u = ŵ of every row, [out, fan-in], but zero where ‖c‖ is at its floor (a constant has no slope); and 1/‖c‖, [out, 1]."""
    centred, squares, scale = centred_rows(weight)
    return with_slope(centred * scale, squares), scale


def with_slope(rows: Tensor, squares: Tensor) -> Tensor:
    """u from ŵ, [out, fan-in], and ‖c‖²."""
    return torch.where(squares > FLOOR, rows, 0.0)


def pull_back(weight: Tensor, g: Tensor) -> Tensor:
    """From gradients in the ŵ of these weights to gradients in the weights."""
    return pull_back_along(*directions(weight.to(g.dtype)), g)


def pull_back_along(unit: Tensor, scale: Tensor, g: Tensor) -> Tensor:
    """(g − mean(g) − u ⟨u, g⟩) / ‖c‖ by row, with the weights' :func:`directions`."""
    flat = g.flatten(-3)
    flat = flat - flat.mean(-1, keepdim=True) - unit * (unit * flat).sum(-1, keepdim=True)
    return (flat * scale).view_as(g)


def centred_rows(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """c, ‖c‖² and 1/‖c‖."""
    rows = weight.flatten(1)
    centred = rows - rows.mean(1, keepdim=True)
    squares = centred.square().sum(1, keepdim=True)
    return centred, squares, squares.clamp(min=FLOOR).rsqrt()
