"""Convolutions in one to three dimensions: padding modes × depthwise, strided, dilated, grouped and transposed."""

from __future__ import annotations

import torch
from attack_case import CLASSES, case, ce, images, labels
from torch import nn

_SIDE = {1: 12, 2: 6, 3: 4}
_CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TURNED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def _network(layer, dims):
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES)), torch.randn(
        9, 2, *[_SIDE[dims]] * dims
    )


def _made(layer, dims):
    net, x = _network(layer, dims)
    with torch.no_grad():
        net(x[:2])  # the last layer finds its size
    return net, (x, labels()), ce


_KINDS = {
    "padded": {"padding": 1},
    "strided": {"padding": 1, "stride": 2},
    "dilated": {"padding": 2, "dilation": 2},
    "depthwise": {"padding": 1, "groups": 2, "out": 4},
}
for _mode in ("circular", "reflect", "replicate"):
    for _kind, _options in _KINDS.items():

        @case(
            f"Conv2d, {_mode} padding, {_kind}",
            10,
            must=_kind == "padded",
            fast=_mode == "circular" and _kind == "padded",
        )
        def _(mode=_mode, options=_options):
            rest = {"out": 3, **options}
            return _made(nn.Conv2d(2, rest.pop("out"), 3, padding_mode=mode, **rest), 2)


for _mode in ("circular", "reflect", "replicate"):

    @case(f"Conv2d, {_mode} padding, mode ghost", 10, options={"grad_sample_mode": "ghost"}, paths=("own loop",))
    def _(mode=_mode):
        net, batch, _ = _made(nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode), 2)
        return net, batch, nn.CrossEntropyLoss()


for _kind, _options in _KINDS.items():

    @case(f"Conv2d, {_kind}, mode ghost", 10, options={"grad_sample_mode": "ghost"}, paths=("own loop",))
    def _(options=_options):
        rest = {"out": 3, **options}
        net, batch, _ = _made(nn.Conv2d(2, rest.pop("out"), 3, **rest), 2)
        return net, batch, nn.CrossEntropyLoss()


for _dims in (1, 2, 3):

    @case(f"Conv{_dims}d, plain", 10, must=True)
    def _(dims=_dims):
        return _made(_CONVS[dims](2, 3, 3), dims)

    @case(f"Conv{_dims}d, grouped, strided and dilated", 10, must=True)
    def _(dims=_dims):
        return _made(_CONVS[dims](2, 4, 2, stride=2, dilation=2, groups=2, bias=False), dims)

    @case(f"Conv{_dims}d, padding='same'", 10, must=True)
    def _(dims=_dims):
        return _made(_CONVS[dims](2, 3, 3, padding="same"), dims)

    @case(f"ConvTranspose{_dims}d, strided and grouped", 10)
    def _(dims=_dims):
        return _made(_TURNED[dims](2, 4, 2, stride=2, groups=2, output_padding=1), dims)


for _dims in (1, 3):

    @case(f"Conv{_dims}d, circular padding", 10)
    def _(dims=_dims):
        return _made(_CONVS[dims](2, 3, 3, padding=1, padding_mode="circular"), dims)


@case("Conv2d, padding='same' with an even kernel", 10)
def _():
    return _made(nn.Conv2d(2, 3, (2, 4), padding="same", dilation=(2, 1)), 2)


@case("Conv2d, channels last", 10)
def _():
    net, (x, y), loss = _made(nn.Conv2d(2, 3, 3, padding=1), 2)
    return net, (x.to(memory_format=torch.channels_last), y), loss


@case("one convolution on two scales", 10)
def _():
    from attack_case import Net

    def run(m, x):
        pooled = nn.functional.avg_pool2d(x, 2)
        return m.out(torch.cat([m.conv(x).flatten(2).mean(2), m.conv(pooled).flatten(2).mean(2)], 1))

    return Net(run, conv=nn.Conv2d(2, 3, 3), out=nn.Linear(6, CLASSES)), images(), ce
