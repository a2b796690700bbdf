"""The operators of the library's kernels by their definition, in double: for tests on a CPU."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from dpivon.privacy.kernels.conv_ops import Geometry


@cache
def register() -> None:
    """Once in a process: torch takes an operator's implementation for good."""
    torch.library.register_kernel("dpivon::conv_statistics", "cpu", plain_statistics)
    torch.library.register_kernel("dpivon::conv_sums", "cpu", plain_sums)
    torch.library.register_kernel("dpivon::position_sums", "cpu", plain_position_sums)


def each_gradient(x, g, shape, rows):
    """[examples, taps · in, out] in double."""
    s = Geometry.of(shape)
    (kh, kw), (sh, sw), (top, left), (dh, dw) = s
    below, right = (
        (n - 1) * step + (k - 1) * d + 1 - size - before
        for n, step, k, d, size, before in zip(
            g.shape[2:], s.stride, s.kernel, s.dilation, x.shape[2:], s.padding, strict=True
        )
    )
    patches = F.unfold(F.pad(x.double(), (left, right, top, below)), (kh, kw), (dh, dw), 0, (sh, sw))
    each = patches.unflatten(1, (-1, kh * kw)).transpose(1, 2).flatten(1, 2) @ g.double().flatten(2).mT
    return each.unflatten(0, (-1, rows)).sum(1)


def plain_statistics(x, g, unit, shape, rows):
    each = each_gradient(x, g, shape, rows)
    if unit is None:
        parts = torch.ops.dpivon.conv_statistics(x.to("meta"), g.to("meta"), None, shape, rows).shape[1]
        return torch.stack([part.square().sum(1) for part in each.tensor_split(parts, 1)], 1).float()
    mean = each.mean(1, keepdim=True)
    each = each - mean
    return torch.stack([mean[:, 0], each.square().sum(1), (each * unit).sum(1)], 1).float()


def plain_sums(x, g, c, found, shape, rows):
    each = each_gradient(x, g, shape, rows)
    each = each if found is None else each - found[:, :1]
    terms = torch.where(c.view(-1, 1, 1) > 0, each * c.view(-1, 1, 1), 0.0)
    tensors = [None if t is None else t.to("meta") for t in (x, g, c, found)]
    chunks = torch.zeros(torch.ops.dpivon.conv_sums(*tensors, shape, rows).shape)
    chunks[0] = terms.sum(0)
    return chunks


def plain_position_sums(gs, double):
    return torch.cat([g.double().sum(1) for g in gs], 1).to(torch.float64 if double else torch.float32)
