"""Convolutions in one, two and three dimensions, with stride, padding, dilation and groups.

Unfolded, a convolution is linear in its patches: g_i = Σ_t G_it ⊗ patch_it for every group. Where weights are standardised
first, their gradients are an ordinary convolution's, pulled back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dpivon.models.standardised import StandardisedConv2d, centred_rows, pull_back_along, with_slope
from dpivon.privacy.layers.convolved import convolved, pulled_back, summed
from dpivon.privacy.layers.memory import empty, free
from dpivon.privacy.layers.registry import Observe, register_forward, register_rule
from dpivon.privacy.layers.uses import Dense, Order, Outer, Use, materialises, outer_or_dense, rows_of_an_example
from dpivon.privacy.precision import as_multiplied, capturing, product, wide_dtype

_PATCHES = 2**20  # elements of unfolded input that are made at a time on a CPU


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, bf16=True)
def conv(layer: _ConvNd, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    if g.dim() == 4 and layer.groups == 1:
        return _conv2d(layer, inputs[0], g)
    uses: dict[Tensor, Use] = {}
    g = g.flatten(2)  # [B, p, T]
    if layer.weight.requires_grad:
        patches = unfold(layer, inputs[0].to(g.dtype))  # [B, C_in, kernel, T]
        n, groups, t = len(g), layer.groups, g.shape[2]
        a, out = patches.reshape(n, groups, -1, t), g.reshape(n, groups, -1, t)
        if groups == 1:
            uses[layer.weight] = outer_or_dense(a[:, 0].mT, out[:, 0].mT, layer.weight.shape)
        else:  # each group has a small weight of its own
            gradients = product(out.flatten(0, 1), a.flatten(0, 1).mT)
            uses[layer.weight] = Dense(gradients.reshape(n, *layer.weight.shape))
    if layer.bias is not None and layer.bias.requires_grad:
        uses[layer.bias] = Dense(g.sum(2, dtype=wide_dtype(g)))
    return uses


def _conv2d(layer: _ConvNd, x: Tensor, g: Tensor) -> Mapping[Tensor, Use]:
    """The common case, channels last: a patch's rows are then contiguous in memory, and so are the output's positions."""
    uses: dict[Tensor, Use] = {}
    weight, bias = layer.weight, layer.bias
    out = _positions(g)
    if weight.requires_grad:
        uses[weight] = convolved(layer, x, g, lambda: _unfolded(layer, x, g, out))
    if bias is not None and bias.requires_grad:
        uses[bias] = summed(out, uses.get(weight))
    return uses


def _unfolded(layer: _ConvNd, x: Tensor, g: Tensor, out: Tensor) -> Use:
    p, c = g.shape[1], x.shape[1]
    x = _padded_channels_last(layer, x.to(g.dtype))
    b, h, w, ch = x.stride()
    (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    view = x.as_strided((len(x), g.shape[2], g.shape[3], kh, kw, c), (b, sh * h, sw * w, dh * h, dw * w, ch))
    d, order = kh * kw * c, Order(torch.Size((p, kh, kw, c)), (0, 3, 1, 2))
    # Of several views the sum is materialised, not each; a CPU makes each in its cache.
    unmade = rows_of_an_example() > 1 and not _in_cache(out)
    if not unmade and materialises(out, d, p):
        return Dense(_gradients(out, view, d), order)
    return Outer(view.reshape(len(x), -1, d), out, layer.weight.shape, order=order)


def _positions(g: Tensor) -> Tensor:
    """[B, p, H, W] as [B, T, p]."""
    return g.permute(0, 2, 3, 1).reshape(len(g), -1, g.shape[1])


def _gradients(out: Tensor, view: Tensor, d: int) -> Tensor:
    """Σ_t G_it ⊗ patch_it for every example, [B, p, d]. The patches are needed for this product only: on a CPU they are made
    for a few examples at a time, in memory that stays in the cache."""
    if not _in_cache(out):
        return product(out.mT, view.reshape(len(view), -1, d))
    gradients = empty((len(view), out.shape[2], d), out)
    rows = max(1, min(len(view), _PATCHES // max(1, view.shape[1:].numel())))
    patches = empty((rows, *view.shape[1:]), view)
    if rows == len(view):
        torch.bmm(out.mT, patches.copy_(view).view(rows, -1, d), out=gradients)
        free(patches)
        return gradients
    for i in range(0, len(view), rows):
        part = view[i : i + rows]
        made = patches[: len(part)].copy_(part).view(len(part), -1, d)
        torch.bmm(out[i : i + rows].mT, made, out=gradients[i : i + rows])
    free(patches)
    return gradients


def _in_cache(out: Tensor) -> bool:
    return not out.is_cuda and out.dtype != torch.bfloat16


def unfold(layer: _ConvNd, x: Tensor) -> Tensor:
    """The patches that the layer multiplies its kernel with, [B, C_in, kernel elements, output positions]."""
    x = _pad(layer, x)
    # As a strided view: for every output position and kernel element, the input element they meet at.
    x = x.contiguous()
    spatial, strides = x.shape[2:], x.stride()[2:]
    kernel, step, spread = layer.kernel_size, layer.stride, layer.dilation
    out = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(spatial, kernel, step, spread, strict=True)]
    view = x.as_strided(
        (*x.shape[:2], *kernel, *out),
        (
            *x.stride()[:2],
            *(d * s for d, s in zip(spread, strides, strict=True)),
            *(n * s for n, s in zip(step, strides, strict=True)),
        ),
    )
    return view.reshape(*x.shape[:2], torch.Size(kernel).numel(), torch.Size(out).numel())


def _padded_channels_last(layer: _ConvNd, x: Tensor) -> Tensor:
    """[B, C, H, W] padded, as [B, H, W, C] in order; zeros are put around it in the copy that orders it."""
    if layer.padding_mode == "zeros":
        pads = layer._reversed_padding_repeated_twice
        x = x.permute(0, 2, 3, 1)
        return (F.pad(x, (0, 0, *pads)) if any(pads) else x).contiguous()
    return _pad(layer, x).permute(0, 2, 3, 1).contiguous()


def _pad(layer: _ConvNd, x: Tensor) -> Tensor:
    pads = layer._reversed_padding_repeated_twice
    if not any(pads):
        return x
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, pads, mode=mode)


# ---- standardised weights


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
    """The layer's own computation, keeping what it finds of its weights: that saves the rule most of its operations, and comes
    to the same, to the bit."""
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
