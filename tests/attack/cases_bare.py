"""Bare parameters of any shape, and parameters that are used behind a layer's back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attack_case import CLASSES, FEATURES, Net, case, ce, mlp, p, sequences, tokens, vectors
from torch import nn
from torch.utils.checkpoint import checkpoint


def _add(m, x, value):
    """x plus a bare parameter's value, through two layers."""
    return m.out((m.fc(x) + value).tanh())


_USES = {
    "a bare [1, d] parameter": ((1, 6), lambda m, x: m.p),
    "a bare [d] parameter": ((6,), lambda m, x: m.p),
    "a bare [] parameter": ((), lambda m, x: m.p),
    "a bare [1, d] parameter, its mean": ((1, 6), lambda m, x: m.p.mean()),
    "a bare [1, d] parameter, sum(0)": ((1, 6), lambda m, x: m.p.sum(0)),
    "a bare [1, d] parameter over its norm": ((1, 6), lambda m, x: m.p / m.p.norm()),
    "a bare [1, d] parameter, [0]": ((1, 6), lambda m, x: m.p[0]),
    "a bare [1, d] parameter, expand": ((1, 6), lambda m, x: m.p.expand(len(x), -1)),
    "a bare [1, d] parameter, repeat": ((1, 6), lambda m, x: m.p.repeat(len(x), 1)),
    "a bare [1, d] parameter, squeeze(0)": ((1, 6), lambda m, x: m.p.squeeze(0)),
    "a bare [1, d] parameter, softmax over dim 0": ((1, 6), lambda m, x: m.p.softmax(0)),
    "a bare [1, d] parameter, cumsum(0)": ((1, 6), lambda m, x: m.p.cumsum(0)),
    "a bare [d] parameter, its mean": ((6,), lambda m, x: m.p.mean()),
    "a bare [d] parameter over its norm": ((6,), lambda m, x: m.p / m.p.norm()),
    "a bare [d] parameter, expand": ((6,), lambda m, x: m.p.expand(len(x), -1)),
    "a bare [2, d] parameter, sum(0)": ((2, 6), lambda m, x: m.p.sum(0)),
    "a bare [9, d] parameter, as many rows as the batch": ((9, 6), lambda m, x: m.p.mean(0)),
    "a bare matrix in a product": ((FEATURES, 6), lambda m, x: x @ m.p),
    "a bare matrix in an einsum": ((FEATURES, 6), lambda m, x: torch.einsum("bi,ij->bj", x, m.p)),
}
_FAST = (
    "[1, d] parameter, its mean",
    "[1, d] parameter, sum(0)",
    "[1, d] parameter over its norm",
    "a bare [d] parameter",
)
for _name, (_shape, _value) in _USES.items():

    @case(_name, 4, fast=_name.endswith(_FAST))
    def _(shape=_shape, value=_value):
        parts = {"fc": nn.Linear(FEATURES, 6), "out": nn.Linear(6, CLASSES), "p": p(*shape)}
        return Net(lambda m, x: _add(m, x, value(m, x)), **parts), vectors(), ce


@case("only a bare [1, d] parameter, its mean", 4)
def _():
    return Net(lambda m, x: x[:, :CLASSES] * m.p.mean(), p=p(1, 6)), vectors(), ce


@case("a class token in front of a sequence", 4)
def _():
    def run(m, x):
        x = torch.cat([m.token.expand(len(x), -1, -1), x], 1)
        return m.out(m.enc(x)[:, 0])

    layer = nn.TransformerEncoderLayer(FEATURES, 2, 6, dropout=0.0, batch_first=True)
    return Net(run, token=p(1, 1, FEATURES), enc=layer, out=nn.Linear(FEATURES, CLASSES)), sequences(), ce


@case("learned positions", 4)
def _():
    run = lambda m, x: m.out((m.fc(x + m.place)).tanh().mean(1))  # noqa: E731
    parts = {"place": p(1, 5, FEATURES), "fc": nn.Linear(FEATURES, 6), "out": nn.Linear(6, CLASSES)}
    return Net(run, **parts), sequences(), ce


class Gate(nn.Module):
    """A layer of one's own: bare parameters beside a layer with a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.inner = p(1), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.alpha * self.inner(x)


@case("a module with a bare parameter and a layer", 4)
def _():
    return mlp(Gate()), vectors(), ce


@case("ParameterList and ParameterDict", 4)
def _():
    run = lambda m, x: m.out((m.fc(x) * m.many[0] + m.named["b"]).tanh())  # noqa: E731
    parts = {"many": nn.ParameterList([p(6)]), "named": nn.ParameterDict({"b": p(6)})}
    return Net(run, fc=nn.Linear(FEATURES, 6), out=nn.Linear(6, CLASSES), **parts), vectors(), ce


@case("a complex parameter", 4)
def _():
    parts = {"w": nn.Parameter(torch.randn(FEATURES, dtype=torch.complex64)), "out": nn.Linear(FEATURES, CLASSES)}
    return Net(lambda m, x: m.out((torch.fft.fft(x) * m.w).abs()), **parts), vectors(), ce


@case("a low-rank adapter on a frozen layer")
def _():
    parts = {"base": nn.Linear(FEATURES, 6).requires_grad_(False), "a": nn.Linear(FEATURES, 2, bias=False)}
    run = lambda m, x: m.out((m.base(x) + m.b(m.a(x))).tanh())  # noqa: E731
    return Net(run, b=nn.Linear(2, 6, bias=False), out=nn.Linear(6, CLASSES), **parts), vectors(), ce


# ---- a layer's parameter used elsewhere


@case("a weight used as a layer and functionally", 16, fast=True)
def _():
    parts = {"fc": nn.Linear(FEATURES, FEATURES), "out": nn.Linear(FEATURES, CLASSES)}
    return Net(lambda m, x: m.out(F.linear(m.fc(x).tanh(), m.fc.weight)), **parts), vectors(), ce


for _mode in ("hooks", "functorch", "ew", "ghost"):

    @case(f"a weight used as a layer and functionally, mode {_mode}", 16, options={"grad_sample_mode": _mode})
    def _():
        parts = {"fc": nn.Linear(FEATURES, FEATURES), "out": nn.Linear(FEATURES, CLASSES)}
        return Net(lambda m, x: m.out(F.linear(m.fc(x).tanh(), m.fc.weight)), **parts), vectors(), nn.CrossEntropyLoss()


@case("a weight used only functionally", 16)
def _():
    parts = {"fc": nn.Linear(FEATURES, 6), "out": nn.Linear(6, CLASSES)}
    return Net(lambda m, x: m.out(F.linear(x, m.fc.weight, m.fc.bias).tanh()), **parts), vectors(), ce


@case("embedding tied to the head functionally", 16)
def _():
    run = lambda m, x: F.linear(m.emb(x).mean(1), m.emb.weight)[:, :CLASSES]  # noqa: E731
    return Net(run, emb=nn.Embedding(7, 6)), tokens(), ce


@case("a bias added once more", 16)
def _():
    parts = {"fc": nn.Linear(FEATURES, 6), "out": nn.Linear(6, CLASSES)}
    return Net(lambda m, x: m.out((m.fc(x) + m.fc.bias).tanh()), **parts), vectors(), ce


def _penalised(model, batch):
    x, y = batch
    return ce(model(x), y) + 0.1 * sum(q.square().sum() for q in model.parameters())


@case("an l2 penalty in the loss", 16, whole=True, each=None, fast=True)
def _():
    return mlp(), vectors(), _penalised


for _mode in ("hooks", "functorch", "ew"):

    @case(f"an l2 penalty in the loss, mode {_mode}", 16, whole=True, each=None, options={"grad_sample_mode": _mode})
    def _():
        return mlp(), vectors(), _penalised


@case("a penalty on the gradient of the outputs", 16, whole=True, each=None)
def _():
    def loss(model, batch):
        x = batch[0].clone().requires_grad_()
        z = model(x)
        (slope,) = torch.autograd.grad(z.sum(), x, create_graph=True)
        return ce(z, batch[1]) + slope.square().sum(1).mean()

    return mlp(), vectors(), loss


for _reentrant in (True, False):

    @case(f"checkpointing, use_reentrant={_reentrant}", 16, must=not _reentrant)
    def _(reentrant=_reentrant):
        def run(m, x):
            x = x if x.requires_grad or not reentrant else x.detach().requires_grad_()
            return m.out(checkpoint(m.net, x, use_reentrant=reentrant).tanh())

        return Net(run, net=mlp(), out=nn.Linear(CLASSES, CLASSES)), vectors(), ce

    for _mode in ("hooks", "functorch"):

        @case(
            f"checkpointing, use_reentrant={_reentrant}, mode {_mode}",
            16,
            options={"grad_sample_mode": _mode},
            paths=("own loop",),
        )
        def _(reentrant=_reentrant):
            def run(m, x):
                x = x if x.requires_grad or not reentrant else x.detach().requires_grad_()
                return m.out(checkpoint(m.net, x, use_reentrant=reentrant).tanh())

            return Net(run, net=mlp(), out=nn.Linear(CLASSES, CLASSES)), vectors(), ce
