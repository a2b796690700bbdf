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
        rows = self.weight.flatten(1)
        centred = rows - rows.mean(1, keepdim=True)
        return (centred * _scale(centred)).view_as(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.standardised(), self.bias)

    def pull_back(self, g: Tensor) -> Tensor:
        """From gradients in ŵ, [..., out, in, kernel, kernel], to gradients in w: (g − mean(g) − ŵ ⟨ŵ, g⟩) / ‖c‖ by row."""
        rows = self.weight.detach().to(g.dtype).flatten(1)
        centred = rows - rows.mean(1, keepdim=True)
        scale = _scale(centred)
        unit = torch.where(
            centred.square().sum(1, keepdim=True) > FLOOR, centred * scale, 0.0
        )  # a constant has no slope
        flat = g.flatten(-3)
        flat = flat - flat.mean(-1, keepdim=True) - unit * (unit * flat).sum(-1, keepdim=True)
        return (flat * scale).view_as(g)


def _scale(centred: Tensor) -> Tensor:
    return centred.square().sum(1, keepdim=True).clamp(min=FLOOR).rsqrt()
