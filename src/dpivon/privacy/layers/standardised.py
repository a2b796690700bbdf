"""Convolutions whose weights are standardised first: their gradients are an ordinary convolution's, pulled back.

The rule finds the weights' directions itself. The forward keeps what it found of them when it standardised the weights, which
saves most of the rule's operations; both come to the same, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpivon.models.standardised import StandardisedConv2d, centred_rows, pull_back_along, with_slope
from dpivon.privacy.layers.conv import conv
from dpivon.privacy.layers.convolved import pulled_back
from dpivon.privacy.layers.registry import Observe, register_forward, register_rule
from dpivon.privacy.layers.uses import Dense, Use
from dpivon.privacy.precision import as_multiplied, capturing


@dataclass(frozen=True)
class Kept:
    """What a forward found of its weights: ŵ by row, ‖c‖² and 1/‖c‖."""

    rows: Tensor
    squares: Tensor
    scale: Tensor


@register_rule(StandardisedConv2d, bf16=True)
def standardised_conv(
    layer: StandardisedConv2d, inputs: tuple[Any, ...], g: Tensor, kept: Kept | None = None
) -> Mapping[Tensor, Use]:
    uses = dict(conv(layer, inputs, g))
    plain = uses.get(layer.weight)
    if plain is not None:
        uses[layer.weight] = _pulled_back(layer, plain, kept)
    return uses


@register_forward(StandardisedConv2d, bf16=True)
def standardised_forward(layer: StandardisedConv2d, observe: Observe, x: Tensor) -> Tensor:
    """The layer's own computation, keeping what it finds of its weights."""
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    centred, squares, scale = centred_rows(weight)
    kept = Kept(centred * scale, squares, scale)
    x = as_multiplied(x)
    z = layer._conv_forward(x, _lying_as(x, kept.rows.view_as(weight)), bias)
    inputs = (x.detach(),)
    return observe(z, lambda g: standardised_conv(layer, inputs, g, kept))


def _lying_as(x: Tensor, weight: Tensor) -> Tensor:
    """Channels last if x's are: recorded once for forward and backward, the compiler writes it so. Otherwise it writes the
    weights twice, or torch's call of cuDNN copies them."""
    last = capturing() and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return weight.contiguous(memory_format=torch.channels_last) if last else weight


def _pulled_back(layer: StandardisedConv2d, plain: Use, kept: Kept | None) -> Use:
    # Directions are taken in the gradients' precision, which is not that of weights in bf16.
    if kept is not None and isinstance(plain, Dense) and plain.g.dtype == kept.rows.dtype:
        return Dense(pull_back_along(with_slope(kept.rows, kept.squares), kept.scale, plain.materialise()))
    return pulled_back(plain, layer.weight.detach().clone())
