"""Rows that look at other rows: statistics of the batch, contrast, routing, mixing, positions in the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attack_case import CLASSES, FEATURES, Net, case, ce, images, mlp, vectors
from torch import nn


def _between(change):
    """A network in which hidden rows h become change(h)."""

    def make():
        parts = {"fc": nn.Linear(FEATURES, 6), "out": nn.Linear(6, CLASSES)}
        return Net(lambda m, x: m.out(change(m.fc(x).tanh())), **parts), vectors(), ce

    return make


def _permuted(h):
    order = torch.arange(len(h) - 1, -1, -1)
    return h[order]


def _top(h):
    """Expert choice: each expert takes the rows with the highest scores."""
    k = max(len(h) // 2, 1)
    taken = torch.zeros_like(h)
    rows = h[:, 0].topk(k).indices
    taken[rows] = h[rows] * 2
    return taken


def _ghost_norm(h):
    """Statistics of virtual batches of three rows."""
    parts = [part - part.mean(0) for part in h.split(3)]
    return torch.cat(parts)


_MIXING = {
    "batch mean taken off by hand": lambda h: h - h.mean(0),
    "batch mean taken off, without gradient": lambda h: h - h.mean(0).detach(),
    "batch standard deviation divided by": lambda h: h / (h.var(0, unbiased=False) + 0.1).sqrt(),
    "largest of the batch divided by": lambda h: h / h.abs().max().clamp(min=0.1),
    "norm of the whole batch divided by": lambda h: h / h.norm().clamp(min=0.1),
    "statistics of virtual batches": _ghost_norm,
    "softmax over dim 0": lambda h: h.softmax(0) * len(h),
    "cumulative sum over the batch": lambda h: h.cumsum(0) / 4,
    "rows rolled by one": lambda h: h.roll(1, 0),
    "rows rolled by one and added": lambda h: h + h.roll(1, 0),
    "rows reversed and not put back": _permuted,
    "first row added to all": lambda h: h + h[:1],
    "gathered across the batch": lambda h: h.gather(0, torch.zeros_like(h, dtype=torch.long)) + h,
    "attention over the batch": lambda h: (h @ h.T).softmax(1) @ h,
    "nearest neighbour in the batch": lambda h: h + h[_nearest(h)],
    "top-k rows of the batch": _top,
    "threshold at the batch's median": lambda h: torch.where(h > h.detach().median(), h, 0.1 * h),
    "ranks within the batch": lambda h: h * (h.detach().argsort(0).argsort(0).to(h.dtype) + 1) / len(h),
    "number of rows as a feature": lambda h: h * len(h) / 8,
    "position in the batch as a feature": lambda h: h * (torch.arange(len(h), dtype=h.dtype) / 8).unsqueeze(1),
    "parity of the position in the batch": lambda h: torch.cat([h[0::2] * 2, h[1::2]])[_interleaved(len(h))],
}


def _nearest(h):
    near = torch.cdist(h.detach(), h.detach())
    near.fill_diagonal_(torch.inf)
    return near.argmin(1)


def _interleaved(n):
    first = torch.arange(0, n, 2)
    order = torch.cat([first, torch.arange(1, n, 2)])
    return order.argsort()


_FAST = ("batch mean taken off by hand", "softmax over dim 0", "rows rolled by one")
for _name, _change in _MIXING.items():
    case(_name, 13, fast=_name in _FAST)(_between(_change))


@case("noise with the batch's scale added", 13, tolerance=None, removed=(8,))
def _():
    return _between(lambda h: h + h.detach().std() * torch.randn_like(h[:1]))()


@case("mixup inside the model", 13)
def _():
    return Net(lambda m, x: m.net(0.7 * x + 0.3 * x.flip(0)), net=mlp()), vectors(), ce


@case("mixup in the training loop", 13, whole=True, each=None)
def _():
    def loss(model, batch):
        x, y = batch
        z = model(0.7 * x + 0.3 * x.flip(0))
        return 0.7 * ce(z, y) + 0.3 * ce(z, y.flip(0))

    return mlp(), vectors(), loss


@case("contrastive loss", 13, each=None, fast=True)
def _():
    def loss(z, y):
        z = F.normalize(z, dim=1)
        return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z)))

    return mlp(), vectors(), loss


@case("contrastive loss between two views", 13, whole=True, each=None)
def _():
    def loss(model, batch):
        a, b = (F.normalize(model(v), dim=1) for v in (batch[0], batch[0] * 1.1))
        return F.cross_entropy(a @ b.T / 0.5, torch.arange(len(a)))

    return mlp(), vectors(), loss


@case("triplet loss within the batch", 13, each=None)
def _():
    return mlp(), vectors(), lambda z, y: F.triplet_margin_loss(z, z.roll(1, 0), z.roll(2, 0))


@case("variance of the outputs over the batch in the loss", 13, each=None)
def _():
    return mlp(), vectors(), lambda z, y: ce(z, y) + (1 - z.var(0, unbiased=False)).square().mean()


@case("rank correlation loss over pairs of rows", 13, each=None)
def _():
    def loss(z, y):
        s = z[:, 0]
        return F.softplus(-(s.unsqueeze(0) - s.unsqueeze(1)) * torch.sign(y.unsqueeze(0) - y.unsqueeze(1))).mean()

    return mlp(), vectors(), loss


@case("load-balancing loss over the batch", 13, whole=True, each=None, fast=True)
def _():
    def run(m, x):
        gate = m.gate(x).softmax(1)
        out = gate[:, :1] * m.a(x) + gate[:, 1:] * m.b(x)
        return out, gate.mean(0).square().sum()

    def loss(model, batch):
        out, balance = model(batch[0])
        return ce(out, batch[1]) + balance

    return Net(run, gate=nn.Linear(FEATURES, 2), a=mlp(), b=mlp()), vectors(), loss


@case("a mixture of experts without a balance", must=True)
def _():
    def run(m, x):
        gate = m.gate(x).softmax(1)
        return gate[:, :1] * m.a(x) + gate[:, 1:] * m.b(x)

    return Net(run, gate=nn.Linear(FEATURES, 2), a=mlp(), b=mlp()), vectors(), ce


@case("top-1 expert of each row by masks")
def _():
    def run(m, x):
        first = (m.gate(x)[:, :1] > 0).to(x.dtype)
        return first * m.a(x) + (1 - first) * m.b(x)

    return Net(run, gate=nn.Linear(FEATURES, 1), a=mlp(), b=mlp()), vectors(), ce


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


class Centred(torch.autograd.Function):
    """The identity, whose gradient is centred over the batch."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0)


class BatchScaled(torch.autograd.Function):
    """Scaled by the batch's mean, which backward takes for a constant."""

    @staticmethod
    def forward(ctx, x):
        ctx.scale = float(x.abs().mean())
        return x / ctx.scale

    @staticmethod
    def backward(ctx, g):
        return g / ctx.scale


class Normed(torch.autograd.Function):
    """The identity, whose gradient is divided by its norm over the whole batch."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g / g.norm().clamp(min=1e-12)


case("gradient reversal", fast=True, must=True)(_between(Reversed.apply))
case("a function whose backward centres over the batch", 13)(_between(Centred.apply))
case("a function scaled by the batch's mean", 13)(_between(BatchScaled.apply))
case("a function whose backward divides by the batch's norm", 13)(_between(Normed.apply))


def _hooked(register):
    net = mlp()
    register(net)
    return net, vectors(), ce


@case("a forward hook of the user's that mixes rows", 13, fast=True)
def _():
    return _hooked(lambda net: net[0].register_forward_hook(lambda m, a, out: out - out.mean(0)))


@case("a forward pre-hook of the user's that mixes rows", 13)
def _():
    return _hooked(lambda net: net[2].register_forward_pre_hook(lambda m, a: (a[0] + a[0].flip(0),)))


@case("a backward hook of the user's that mixes rows", 13)
def _():
    return _hooked(lambda net: net[1].register_full_backward_hook(lambda m, gi, go: (gi[0] - gi[0].mean(0),)))


@case("a gradient hook on an activation that mixes rows", 13)
def _():
    def run(m, x):
        h = m.fc(x).tanh()
        if h.requires_grad:
            h.register_hook(lambda g: g - g.mean(0))
        return m.out(h)

    return Net(run, fc=nn.Linear(FEATURES, 6), out=nn.Linear(6, CLASSES)), vectors(), ce


@case("a harmless forward hook", must=True)
def _():
    return _hooked(lambda net: net[0].register_forward_hook(lambda m, a, out: out * 2))


@case("style statistics swapped between images", 13)
def _():
    def run(m, x):
        h = m.conv(x)
        mean, std = h.mean((2, 3), keepdim=True), h.std((2, 3), keepdim=True) + 0.1
        return m.out(((h - mean) / std * std.roll(1, 0) + mean.roll(1, 0)).flatten(1))

    return Net(run, conv=nn.Conv2d(2, 3, 3), out=nn.Linear(48, CLASSES)), images(), ce


@case("behaviour that depends on a large batch", 13)
def _():
    run = lambda m, x: m.net(x) if len(x) < 9 else m.net(x - x.mean(0))  # noqa: E731
    return Net(run, net=mlp()), vectors(), ce


@case("behaviour that depends on extreme values", 13)
def _():
    """Ordinary rows are independent; once one is extreme the whole batch is rescaled."""

    def run(m, x):
        return m.net(x / x.abs().max() if x.abs().max() > 50 else x)

    return Net(run, net=mlp()), vectors(), ce
