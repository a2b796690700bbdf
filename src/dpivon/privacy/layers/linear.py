"""Linear layers with any leading dimensions, z = x Wᵀ + b, and embeddings.

Each index of an embedding adds its output's gradient to one row of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dpivon.errors import bad
from dpivon.privacy.layers.convolved import projected, summed
from dpivon.privacy.layers.registry import register_rule
from dpivon.privacy.layers.uses import Rows, Use
from dpivon.privacy.precision import ALIGNED, as_multiplied, launches_cost, padded

_LARGE = 4096  # outputs of a layer that is worth a copy of its weight


@register_rule(nn.Linear, NonDynamicallyQuantizableLinear, RNNLinear, bf16=True)
def linear(layer: Any, inputs: tuple[Any, ...], g: Tensor, transposed: bool = False) -> Mapping[Tensor, Use]:
    uses: dict[Tensor, Use] = {}
    weight, bias, product = layer.weight, layer.bias, None
    g = _rows_of_positions(g)
    if weight.requires_grad:
        x = inputs[0] if inputs[0].dtype is g.dtype else inputs[0].to(g.dtype)
        product = uses[weight] = projected(_rows_of_positions(x), g, weight.shape, transposed)
    if bias is not None and bias.requires_grad:
        uses[bias] = summed(g, product)
    return uses


@register_rule("transformers.Conv1D", bf16=True)
def hugging_face_conv1d(layer: Any, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    """z = x W + b, a linear layer with its weight stored the other way round."""
    return linear(layer, inputs, g, transposed=True)


class _Head(torch.autograd.Function):
    """x Wᵀ, computed with columns of zeros up to a multiple of eight. Of 50,257 columns products take four times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        n, d = weight.shape
        rows = x.new_zeros(n + -n % ALIGNED, d)
        rows[:n].copy_(weight)
        ctx.save_for_backward(rows)
        z = x @ rows.mT
        # Not a view, which its caller could not change in place.
        return z.new_empty(0).set_(z.untyped_storage(), 0, (*z.shape[:-1], n), z.stride())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return padded(g) @ rows, None


def is_head(layer: Any) -> bool:
    """Whether it is a large layer whose outputs are not as many as tensor cores like."""
    own = type(layer) is nn.Linear and "forward" not in vars(layer) and vars(layer)["_parameters"]["bias"] is None
    return own and layer.out_features > _LARGE and layer.out_features % ALIGNED > 0


def head(layer: Any, x: Tensor) -> Tensor:
    """What the layer returns for x; where its weight gets no gradient, in bf16 on a GPU, by products of aligned operands."""
    x = as_multiplied(x)
    if x.dtype != torch.bfloat16 or not launches_cost(x) or layer.weight.requires_grad:
        return F.linear(x, layer.weight)
    return _Head.apply(x, layer.weight)  # type: ignore[no-untyped-call]


def _rows_of_positions(t: Tensor) -> Tensor:
    """[B, …, n] as [B, T, n]."""
    return t if t.ndim == 3 else t.reshape(t.shape[0], -1, t.shape[-1])


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
