"""Linear layers with any leading dimensions: z = x Wᵀ + b; also the cells of Opacus's recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dpivon.privacy.layers.projected import projected
from dpivon.privacy.layers.registry import register_rule
from dpivon.privacy.layers.summed import summed
from dpivon.privacy.layers.uses import Use


@register_rule(nn.Linear, NonDynamicallyQuantizableLinear, RNNLinear, bf16=True)
def linear(layer: nn.Linear, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    uses: dict[Tensor, Use] = {}
    weight, bias = layer.weight, layer.bias
    g = _rows_of_positions(g)
    if weight.requires_grad:
        uses[weight] = projected(_rows_of_positions(inputs[0].to(g.dtype)), g, weight.shape)
    if bias is not None and bias.requires_grad:
        uses[bias] = summed(g, uses.get(weight))
    return uses


def _rows_of_positions(t: Tensor) -> Tensor:
    """[B, …, n] as [B, T, n]."""
    return t if t.dim() == 3 else t.reshape(t.shape[0], -1, t.shape[-1])
