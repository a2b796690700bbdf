"""The definition of clipped sums, a loop over examples in fp64, and book-keeping held to it."""

from __future__ import annotations

import math

import torch
from torch import nn

from dpivon.privacy.clipping import FlatClipping, clipped_sum
from dpivon.privacy.gradients.bookkeeping import BookKeeper


def loss_of(output, weight):
    """A per-example loss that reaches every output element differently."""
    return (torch.tanh(output) * weight[: output[0].numel()].view_as(output[0])).flatten(1).sum(1)


def loop(model, x, weight, clipping):
    """The definition: one example at a time, in fp64."""
    params = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(x)):
        loss = loss_of(model(x[i : i + 1]), weight).sum()
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)])
    return clipped_sum([torch.stack(column) for column in zip(*rows, strict=True)], clipping)


def book(model, x, weight, clipping, *, reduction="mean", channels_last=False, **options):
    keeper = BookKeeper(model, batch_first=True, loss_reduction=reduction, **options)
    params = [p for p in model.parameters() if p.requires_grad]
    try:
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        losses = loss_of(model(x), weight)
        (losses.mean() if reduction == "mean" else losses.sum()).backward()
        assert all(p.grad is None for p in params), "an ordinary weight gradient was computed"
        return keeper.clipped_sums(params, clipping)
    finally:
        keeper.detach_from_model()


def agree(model, x, *, clip=None, dtype=torch.float64, tolerance=1e-10, **options):
    """Relative error against the fp64 loop, with clipping active for about half of the examples and with none."""
    weight = torch.randn(8192, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    reference = model.double()
    wide = x.double() if x.is_floating_point() else x
    norm = max(
        float(torch.cat([s.flatten() for s in loop(reference, wide[:1], weight, FlatClipping(1e9))]).norm()), 1e-3
    )
    for bound in [clip] if clip else [0.9 * norm, 1e6 * norm]:
        expected = loop(reference, wide, weight, FlatClipping(bound))
        model.to(dtype)
        got = book(model, x.to(dtype) if x.is_floating_point() else x, weight.to(dtype), FlatClipping(bound), **options)
        model.double()
        # Relative to what was summed, not to the sum, which may cancel.
        scale = max(
            math.sqrt(sum(float(e.square().sum()) for e in expected)), min(bound, norm) * math.sqrt(len(x)) / 10
        )
        error = math.sqrt(sum(float((e - g.double()).square().sum()) for e, g in zip(expected, got, strict=True)))
        assert error <= tolerance * scale, (bound, error / scale)


def both_precisions(model, x, **options):
    agree(model, x, **options)
    agree(model, x, dtype=torch.float32, tolerance=1e-5, **options)


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 5),
    )
