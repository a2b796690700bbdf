"""Normalisation layers that do not mix examples: y = γ ẑ + β, with ẑ the normalised input.

The gradient of γ is Σ G ẑ and that of β is Σ G, over every dimension but the example's and the parameter's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dpivon.privacy.layers.registry import register_rule
from dpivon.privacy.layers.uses import Dense, Use


@register_rule(nn.GroupNorm)
def group_norm(layer: nn.GroupNorm, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    return _channelwise(layer, F.group_norm(inputs[0].to(g.dtype), layer.num_groups, eps=layer.eps), g)


@register_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(layer: nn.InstanceNorm2d, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    return _channelwise(layer, F.instance_norm(inputs[0].to(g.dtype), eps=layer.eps), g)


@register_rule(nn.LayerNorm)
def layer_norm(layer: nn.LayerNorm, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    return _elementwise(layer, F.layer_norm(inputs[0].to(g.dtype), layer.normalized_shape, eps=layer.eps), g)


@register_rule(nn.RMSNorm)
def rms_norm(layer: nn.RMSNorm, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    return _elementwise(layer, F.rms_norm(inputs[0].to(g.dtype), layer.normalized_shape, eps=layer.eps), g)


def _channelwise(layer: Any, z: Tensor, g: Tensor) -> Mapping[Tensor, Use]:
    """Parameters of shape [C] against values of shape [B, C, …]."""
    positions = tuple(range(2, g.dim()))
    uses: dict[Tensor, Use] = {}
    if layer.weight is not None and layer.weight.requires_grad:
        product = z.mul_(g)  # z was made for this
        uses[layer.weight] = Dense(product.sum(positions) if positions else product)
    if layer.bias is not None and layer.bias.requires_grad:
        uses[layer.bias] = Dense(g.sum(positions) if positions else g)
    return uses


def _elementwise(layer: Any, z: Tensor, g: Tensor) -> Mapping[Tensor, Use]:
    """Parameters in the shape of the last dimensions, against values of shape [B, …, *shape]."""
    shape = layer.normalized_shape
    g, z = (t.reshape(len(g), -1, *shape) for t in (g, z))
    uses: dict[Tensor, Use] = {}
    if layer.weight is not None and layer.weight.requires_grad:
        uses[layer.weight] = Dense((g * z).sum(1))
    bias = getattr(layer, "bias", None)
    if bias is not None and bias.requires_grad:
        uses[bias] = Dense(g.sum(1))
    return uses
