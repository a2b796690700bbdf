"""Linear layers with any leading dimensions, z = x Wᵀ + b, and embeddings.

Each index of an embedding adds its output's gradient to one row of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dpivon.errors import bad
from dpivon.privacy.layers.convolved import projected, summed
from dpivon.privacy.layers.registry import register_rule
from dpivon.privacy.layers.uses import Rows, Use


@register_rule(nn.Linear, NonDynamicallyQuantizableLinear, RNNLinear, bf16=True)
def linear(layer: Any, inputs: tuple[Any, ...], g: Tensor, transposed: bool = False) -> Mapping[Tensor, Use]:
    uses: dict[Tensor, Use] = {}
    weight, bias = layer.weight, layer.bias
    g = _rows_of_positions(g)
    if weight.requires_grad:
        uses[weight] = projected(_rows_of_positions(inputs[0].to(g.dtype)), g, weight.shape, transposed)
    if bias is not None and bias.requires_grad:
        uses[bias] = summed(g, uses.get(weight))
    return uses


@register_rule("transformers.Conv1D", bf16=True)
def hugging_face_conv1d(layer: Any, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    """z = x W + b, a linear layer with its weight stored the other way round."""
    return linear(layer, inputs, g, transposed=True)


def _rows_of_positions(t: Tensor) -> Tensor:
    """[B, …, n] as [B, T, n]."""
    return t if t.dim() == 3 else t.reshape(t.shape[0], -1, t.shape[-1])


@register_rule(nn.Embedding)
def embedding(layer: nn.Embedding, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    if layer.scale_grad_by_freq:
        fix = "Make the embedding without it"
        raise bad("scale_grad_by_freq", True, "counts over the whole batch and so mixes examples", fix)
    index = inputs[0].reshape(len(g), -1)
    g = g.reshape(len(g), index.shape[1], -1)
    if layer.padding_idx is not None:
        g = g.masked_fill((index == layer.padding_idx).unsqueeze(2), 0.0)
    return {layer.weight: Rows(index, g, layer.weight.shape)}
