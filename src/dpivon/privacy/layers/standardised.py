"""Convolutions whose weights are standardised first: their gradients are an ordinary convolution's, pulled back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dpivon.models.standardised import StandardisedConv2d
from dpivon.privacy.layers.conv import conv
from dpivon.privacy.layers.convolved import Convolved
from dpivon.privacy.layers.pulled_back import pulled_back
from dpivon.privacy.layers.registry import register_rule
from dpivon.privacy.layers.uses import Use


@register_rule(StandardisedConv2d, bf16=True)
def standardised_conv(layer: StandardisedConv2d, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    uses = dict(conv(layer, inputs, g))
    plain = uses.get(layer.weight)
    if plain is not None:
        weight = layer.weight.detach().clone()
        uses[layer.weight] = plain.standardised(weight) if isinstance(plain, Convolved) else pulled_back(plain, weight)
    return uses
