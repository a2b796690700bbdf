"""Normalisation layers that do not mix examples: y = γ ẑ + β, with ẑ the normalised input.

The gradient of γ is Σ G ẑ and that of β is Σ G, over every dimension but the example's and the parameter's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpivon.privacy.kernels import conv_ops
from dpivon.privacy.layers.convolved import Summed, waits
from dpivon.privacy.layers.memory import empty, free
from dpivon.privacy.layers.registry import Observe, register_forward, register_rule
from dpivon.privacy.layers.unsummed import Unsummed, left_unsummed
from dpivon.privacy.layers.uses import Dense, Use
from dpivon.privacy.precision import capturing, launches_cost

_POSITIONS = 256  # more than these a compiler adds up in a loop


@register_forward(nn.GroupNorm)
def group_norm(layer: nn.GroupNorm, observe: Observe, x: Tensor) -> Tensor:
    """The layer's own computation, keeping each group's mean and deviation, which the gradient of γ needs again."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.float()
    # torch's own kernel for GPUs wants its channels first; a compiler takes them as they come.
    as_it_is = x.dim() == 4 and (not x.is_cuda or capturing()) and x.is_contiguous(memory_format=torch.channels_last)
    x = x if as_it_is else x.contiguous()
    weight, bias = (None if p is None else p.detach() for p in (layer.weight, layer.bias))
    n, c = x.shape[:2]
    positions = x.shape[2:].numel()
    normalise: Any = _ChannelsLast.apply if as_it_is and capturing() else torch.native_group_norm
    z, mean, rstd = normalise(x, weight, bias, n, c, positions, layer.num_groups, layer.eps)
    if not layer.affine:
        return z
    data, mean, rstd = x.detach(), mean.detach(), rstd.detach()
    return observe(z, lambda g: _group_uses(layer, data, mean, rstd, g))


class _ChannelsLast(torch.autograd.Function):
    """A group normalisation of channels that lie last, recorded with a gradient that lies so too. On a GPU torch's own gradient
    puts channels first, even where it is recorded in parts: every convolution before it would copy its gradient back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        n: int,
        c: int,
        positions: int,
        groups: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        z, mean, rstd = torch.native_group_norm(x, weight, bias, n, c, positions, groups, eps)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.sizes = n, c, positions, groups
        return z, mean, rstd

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight = ctx.saved_tensors
        g = g.contiguous(memory_format=torch.channels_last)
        of_x = torch.ops.aten.native_group_norm_backward(g, x, mean, rstd, weight, *ctx.sizes, [True, False, False])[0]
        return of_x, *(None for _ in range(7))


def _group_uses(layer: nn.GroupNorm, x: Tensor, mean: Tensor, rstd: Tensor, g: Tensor) -> Mapping[Tensor, Use]:
    n, c, groups = len(x), x.shape[1], layer.num_groups
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        x, g = (t.permute(0, 2, 3, 1).flatten(1, 2) for t in (x, g))  # [B, T, C]
        over, rows = 1, (n, x.shape[1], c)
        mean = mean.repeat_interleave(c // groups, 1).unsqueeze(1)  # long rows of channels, not short ones of a group's
    else:
        x, g = (t.reshape(n, c, -1) for t in (x, g))  # [B, C, T]
        over, rows = 2, (n, groups, c // groups * x.shape[2])
        mean = mean.unsqueeze(2)
    uses: dict[Tensor, Use] = {}
    if layer.weight.requires_grad:
        centred = empty(tuple(x.shape), g)
        torch.sub(x.view(rows), mean.to(g.dtype), out=centred.view(rows))
        sums = centred.mul_(g).sum(over)
        sums.view(n, groups, c // groups).mul_(rstd.to(g.dtype).unsqueeze(2))
        uses[layer.weight] = Dense(sums)
        free(centred)
    if layer.bias.requires_grad:
        uses[layer.bias] = Dense(g.sum(over))
    return uses


@register_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(layer: nn.InstanceNorm2d, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    z = F.instance_norm(inputs[0].to(g.dtype), eps=layer.eps)
    return _sums(layer, z.flatten(2), g.flatten(2), over=2)


@register_rule(nn.LayerNorm)
def layer_norm(layer: nn.LayerNorm, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    return _elementwise(layer, F.layer_norm, inputs[0], g)


@register_rule(nn.RMSNorm)
def rms_norm(layer: nn.RMSNorm, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    return _elementwise(layer, F.rms_norm, inputs[0], g)


def _elementwise(layer: Any, normalise: Callable[..., Tensor], x: Tensor, g: Tensor) -> Mapping[Tensor, Use]:
    """Parameters in the shape of the last dimensions, against values of shape [B, …, *shape]."""
    shape, weight, bias = layer.normalized_shape, layer.weight, getattr(layer, "bias", None)
    one_pass = conv_ops.normalises(g, math.prod(shape)) and launches_cost(g)
    if left_unsummed(g, x, one_pass=one_pass):
        if g.dim() != 2 + len(shape):
            rows = (g.shape[0], -1, *shape)
            x, g = x.reshape(rows), g.reshape(rows)
        known: dict[Tensor, Use] = {bias: Unsummed(g)} if bias is not None and bias.requires_grad else {}
        if weight is not None and weight.requires_grad:
            known[weight] = Unsummed(g, x, (normalise, shape, layer.eps))
        return known
    if one_pass:
        eps = torch.finfo(g.dtype).eps if layer.eps is None else layer.eps
        if g.dim() != 3 or len(shape) > 1:
            x, g = (t.reshape(len(g), -1, math.prod(shape)) for t in (x, g))
        sums = conv_ops.normalised_sums(x, g, eps, centred=normalise is F.layer_norm)
        if len(shape) > 1:
            sums = tuple(own.unflatten(1, shape) for own in sums)
        found = zip((weight, bias), sums, strict=True)
        return {p: Dense(own) for p, own in found if p is not None and p.requires_grad}
    z = normalise(x.to(g.dtype), shape, eps=layer.eps)
    return _sums(layer, z.reshape(len(g), -1, *shape), g.reshape(len(g), -1, *shape), over=1)


def _sums(layer: Any, z: Tensor, g: Tensor, over: int) -> Mapping[Tensor, Use]:
    uses: dict[Tensor, Use] = {}
    if layer.weight is not None and layer.weight.requires_grad:
        uses[layer.weight] = _over_positions(z.mul_(g), over)  # z was made for this
    bias = getattr(layer, "bias", None)
    if bias is not None and bias.requires_grad:
        uses[bias] = _over_positions(g, over)
    return uses


def _over_positions(t: Tensor, over: int) -> Use:
    """Σ over one dimension. Recorded for a GPU, the positions of a short text or an image are added up a few at a time, and
    these sums wait for those of other layers: a compiler that adds up all of a layer's positions for several layers at once
    holds so much in registers that one block of threads fills a processor."""
    few = next((n for n in (8, 7, 6, 5, 9, 10, 4) if t.shape[over] % n == 0), 0)
    if few and over == 1 and t.dim() == 3 and 2 * few < t.shape[1] <= _POSITIONS and waits(t):
        return Summed(t.unflatten(1, (-1, few)).sum(2), partly=True)
    return Dense(t.sum(over))
