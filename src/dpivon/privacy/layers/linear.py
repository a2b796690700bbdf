"""Linear layers with any leading dimensions: z = x Wᵀ + b; also the cells of Opacus's recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dpivon.privacy.layers.projected import projected
from dpivon.privacy.layers.registry import register_rule
from dpivon.privacy.layers.uses import Dense, Use
from dpivon.privacy.precision import wide


@register_rule(nn.Linear, NonDynamicallyQuantizableLinear, RNNLinear, bf16=True)
def linear(layer: nn.Linear, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    uses: dict[Tensor, Use] = {}
    g = g.reshape(len(g), -1, g.shape[-1])
    if layer.weight.requires_grad:
        a = inputs[0].to(g.dtype).reshape(len(g), -1, inputs[0].shape[-1])
        uses[layer.weight] = projected(a, g, layer.weight.shape)
    if layer.bias is not None and layer.bias.requires_grad:
        uses[layer.bias] = Dense(wide(g).sum(1))
    return uses
