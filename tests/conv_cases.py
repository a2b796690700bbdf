"""Convolutions that the kernels take, and their per-example gradients by definition: one example at a time, in double."""

from __future__ import annotations

import torch
from torch import nn

from dpivon.models import StandardisedConv2d
from dpivon.privacy.layers.conv import conv, standardised_conv

#: In, out, side of the image, and the rest of the layer's arguments.
CASES = {
    "3x3": (16, 32, 8, {"kernel_size": 3, "padding": 1}),
    "3x3 stride 2": (16, 32, 8, {"kernel_size": 3, "padding": 1, "stride": 2}),
    "1x1 shortcut": (32, 16, 8, {"kernel_size": 1, "stride": 2}),
    "5x5 unpadded": (16, 16, 8, {"kernel_size": 5}),
    "dilated": (16, 16, 9, {"kernel_size": 3, "padding": 2, "dilation": 2}),
    "oblong": (16, 16, 7, {"kernel_size": (3, 1), "padding": (0, 1), "stride": (1, 2)}),
    "same": (16, 16, 6, {"kernel_size": 4, "padding": "same"}),
    "first layer": (3, 16, 8, {"kernel_size": 3, "padding": 1}),
    "grey first layer": (1, 16, 8, {"kernel_size": 5, "padding": 2}),
    "odd channels": (48, 80, 5, {"kernel_size": 3, "padding": 1}),
}
KINDS = {"plain": nn.Conv2d, "standardised": StandardisedConv2d}


def make(case, kind, examples=4, dtype=torch.float32, device="cpu", offset=0.0, seed=0):
    """A layer, an input and the gradient of its output. One output channel's weights are almost equal: at the floor."""
    into, out, side, arguments = CASES[case]
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = KINDS[kind](into, out, **arguments)
    with torch.no_grad():
        layer.weight[1] = 0.3 + 1e-4 * torch.randn(layer.weight[1].shape, generator=generator)
    x = (torch.randn(examples, into, side, side, generator=generator) + offset).to(dtype)
    shape = nn.functional.conv2d(
        x.float(), layer.weight, None, layer.stride, layer.padding, layer.dilation
    ).shape  # fmt: skip
    g = torch.randn(shape, generator=generator).to(dtype)
    return layer.to(device), x.to(device), g.to(device)


def gradients(layer, x, g):
    """[N, *weight], in double, from the very operands: what autograd says of Σ ⟨g, output⟩, through any standardisation."""
    weight = layer.weight.detach().double().requires_grad_()
    exact = type(layer)(layer.in_channels, layer.out_channels, **_arguments(layer)).to(x.device).double()
    rows = []
    for a, b in zip(x.double(), g.double(), strict=True):
        output = torch.func.functional_call(exact, {"weight": weight, "bias": b.new_zeros(len(b))}, (a.unsqueeze(0),))
        rows.append(torch.autograd.grad((output * b).sum(), weight)[0])
    return torch.stack(rows)


def _arguments(layer):
    return {key: getattr(layer, key) for key in ("kernel_size", "stride", "padding", "dilation")}


def use_of(layer, x, g):
    """What the layer's rule says of its weight."""
    rule = standardised_conv if isinstance(layer, StandardisedConv2d) else conv
    return rule(layer, (x,), g)[layer.weight]


def slack(kind, dtype):
    """How much too large norms of random gradients may be: directions in bf16 leave out a little of what is taken away."""
    return 5e-4 if kind == "standardised" and dtype == torch.bfloat16 else 0.0


def check_against_the_loop(case, kind, tolerance, **options):
    """Norms, and a weighted sum in which one example is dropped that holds NaN."""
    layer, x, g = make(case, kind, **options)
    exact = gradients(layer, x, g)
    use = use_of(layer, x, g)
    norms = exact.flatten(1).norm(dim=1)
    got = use.squared_norm().double().sqrt()
    torch.testing.assert_close(got.clamp(max=norms), norms, rtol=tolerance, atol=0.0)
    torch.testing.assert_close(got.clamp(min=norms), norms, rtol=tolerance + slack(kind, g.dtype), atol=0.0)
    x, g = x.clone(), g.clone()
    x[2, 0, 3, 3], g[2, 1] = float("nan"), float("inf")
    c = torch.rand(len(x), dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(x.device)
    c[2] = 0.0
    use = use_of(layer, x, g)
    assert not torch.isfinite(use.squared_norm()[2])
    assert torch.isfinite(use.squared_norm()[[0, 1, 3]]).all()
    exact[2] = 0.0
    total = (exact * c.view(-1, 1, 1, 1, 1)).sum(0)
    got = use.without(c == 0.0).weighted_sum(c)
    assert got.dtype == torch.float64
    assert got.shape == layer.weight.shape
    assert float((got - total).norm()) <= tolerance * float((norms * c).sum())
    return use
