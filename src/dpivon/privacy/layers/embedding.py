"""Embeddings: each index adds its output's gradient to one row of the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dpivon.errors import bad
from dpivon.privacy.layers.registry import register_rule
from dpivon.privacy.layers.uses import Rows, Use


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
