"""Rows that are not examples: folded into the batch, split, sorted or packed; and inputs of every kind."""

from __future__ import annotations

from typing import NamedTuple

import torch
from attack_case import CLASSES, FEATURES, Net, case, ce, labels, mlp, p, sequences, tokens, vectors
from opacus.layers import DPGRU, DPLSTM
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Pair(NamedTuple):
    x: Tensor
    scale: Tensor


def _folded(*between: nn.Module, get=lambda x: x):
    """Everything runs on folded rows [B·T, d]; their outputs are averaged per example."""

    def run(m, given):
        x = get(given)
        return m.net(x.reshape(-1, FEATURES)).view(len(x), -1, CLASSES).mean(1)

    return Net(run, net=mlp(*between))


class Scaled(nn.Module):
    """A bare parameter of the features' shape."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = p(6)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


for _name, _between in {
    "rules": list,
    "PReLU": lambda: [nn.PReLU()],
    "a bare [d] parameter": lambda: [Scaled()],
    "LayerNorm": lambda: [nn.LayerNorm(6)],
}.items():

    @case(f"tokens folded into rows, {_name}", 2, fast=_name != "LayerNorm")
    def _(between=_between):
        return _folded(*between()), sequences(), ce


_KINDS = {
    "dict": (lambda x: {"x": x}, lambda g: g["x"]),
    "list": (lambda x: [x], lambda g: g[0]),
    "tuple": (lambda x: (x, x), lambda g: g[0] + g[1]),
    "namedtuple": (lambda x: Pair(x, x[:, 0]), lambda g: g.x),
    "nested": (lambda x: {"a": [{"x": x}], "n": x.sum(2)}, lambda g: g["a"][0]["x"]),
}
for _name, (_wrap, _get) in _KINDS.items():

    @case(f"tokens folded into rows, {_name} input", 3, fast=_name == "dict", paths=("own loop", "ddp"))
    def _(wrap=_wrap, get=_get):
        x, y = sequences()
        return _folded(get=get), (wrap(x), y), ce

    @case(f"{_name} input", 3, must=True, fast=_name == "dict", paths=("own loop", "ddp"))
    def _(wrap=_wrap, get=_get):
        x, y = sequences()
        return Net(lambda m, given: m.net(get(given)).mean(1), net=mlp()), (wrap(x), y), ce


@case("dict input to fit", 3, paths=("fit", "stacked"))
def _():
    x, y = vectors()
    return Net(lambda m, given: m.net(given["x"]), net=mlp()), ({"x": x}, y), ce


@case("mask beside tokens, dict input", 3, must=True, paths=("own loop", "ddp"))
def _():
    def run(m, given):
        kept = given["mask"].unsqueeze(-1).to(m.out.weight.dtype)
        return m.out((m.emb(given["ids"]) * kept).sum(1) / kept.sum(1).clamp(min=1))

    ids, y = tokens()
    parts = {"emb": nn.Embedding(7, 6), "out": nn.Linear(6, CLASSES)}
    return Net(run, **parts), ({"ids": ids, "mask": ids > 2}, y), ce


@case("tokens folded and the padding left out", 2)
def _():
    def run(m, x):
        kept = x[..., 0] > -0.5  # a different number of rows per example
        out = torch.zeros(*x.shape[:2], CLASSES, dtype=x.dtype)
        out[kept] = m.net(x[kept])
        return out.mean(1)

    return Net(run, net=mlp()), sequences(), ce


@case("features folded so that rows are as many as examples", 2)
def _():
    run = lambda m, x: m.net(x.reshape(len(x), -1).t().reshape(-1, FEATURES)[: len(x)])  # noqa: E731
    return Net(run, net=mlp()), vectors(), ce


@case("patches of images folded by unfold", 2)
def _():
    def run(m, x):
        patches = nn.functional.unfold(x, 2, stride=2).transpose(1, 2)
        return m.net(patches.reshape(-1, 8)).view(len(x), -1, CLASSES).mean(1)

    return Net(run, net=mlp(features=8)), (torch.randn(9, 2, 4, 4), labels()), ce


@case("time steps as rows of a convolution", 2)
def _():
    def run(m, x):
        b, t = x.shape[:2]
        return m.out(m.conv(x.reshape(b * t, 1, 2, 2)).tanh().view(b, t, -1).mean(1))

    return Net(run, conv=nn.Conv2d(1, 3, 2), out=nn.Linear(3, CLASSES)), sequences(), ce


def _halves(run):
    """Two forwards of half a batch each, one backward."""
    for x, y in run.batches():
        run.optimizer.zero_grad()
        cut = len(x) // 2
        losses = [run.criterion(run.model(a), b) * len(a) for a, b in ((x[:cut], y[:cut]), (x[cut:], y[cut:]))]
        (sum(losses) / len(x)).backward()
        run.optimizer.step()


@case("two half-batches and one backward", 2, loop=_halves, paths=("own loop", "ddp"))
def _():
    return mlp(), vectors(), ce


@case("two half-batches and one backward, PReLU", 2, loop=_halves, fast=True, paths=("own loop", "ddp"))
def _():
    return mlp(nn.PReLU()), vectors(), ce


@case("two half-batches inside the model", 2)
def _():
    run = lambda m, x: torch.cat([m.net(part) for part in x.split(5)])  # noqa: E731
    return Net(run, net=mlp()), vectors(), ce


@case("a loop over rows inside the model")
def _():
    run = lambda m, x: torch.stack([m.net(row) for row in x])  # noqa: E731
    return Net(run, net=mlp()), vectors(), ce


@case("torch.vmap over rows inside the model")
def _():
    return Net(lambda m, x: torch.vmap(m.net)(x), net=mlp()), vectors(), ce


for _cell in (DPLSTM, DPGRU):
    for _sorted in (True, False):

        @case(f"packed {_cell.__name__}, {'sorted' if _sorted else 'unsorted'} lengths", 2, paths=("own loop", "ddp"))
        def _(cell=_cell, in_order=_sorted):
            def run(m, given):
                x, lengths = given["x"], given["length"]
                packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=in_order)
                h, _ = pad_packed_sequence(m.cell(packed)[0], batch_first=True, total_length=x.shape[1])
                return m.out(h.sum(1))

            x, y = sequences()
            length = (
                torch.tensor([5, 5, 4, 4, 3, 3, 2, 2, 1]) if in_order else torch.tensor([3, 5, 1, 2, 4, 5, 2, 3, 1])
            )
            parts = {"cell": cell(FEATURES, 5, batch_first=True), "out": nn.Linear(5, CLASSES)}
            return Net(run, **parts), ({"x": x, "length": length}, y), ce


def _sorted_rows(m, x):
    order = x[:, 0].argsort()
    return m.net(x[order])[order.argsort()]


@case("rows sorted by the data and put back", 11, fast=True)
def _():
    return Net(_sorted_rows, net=mlp()), vectors(), ce


@case("rows sorted by the data and put back, PReLU", 11)
def _():
    return Net(_sorted_rows, net=mlp(nn.PReLU())), vectors(), ce


@case("rows reversed and put back", 11)
def _():
    return Net(lambda m, x: m.net(x.flip(0)).flip(0), net=mlp()), vectors(), ce


@case("rows permuted at random and put back", 11, tolerance=None, removed=(8,))
def _():
    def run(m, x):
        order = torch.randperm(len(x))
        return m.net(x[order])[order.argsort()]

    return Net(run, net=mlp()), vectors(), ce


@case("one layer on sorted rows", 11)
def _():
    def run(m, x):
        h = m.fc(x).tanh()
        order = h[:, 0].argsort()
        return m.out(m.mid(h[order]).tanh()[order.argsort()])

    parts = {"fc": nn.Linear(FEATURES, 6), "mid": nn.Linear(6, 6), "out": nn.Linear(6, CLASSES)}
    return Net(run, **parts), vectors(), ce


@case("experts that each see the rows sent to them", 11)
def _():
    def run(m, x):
        sent = x[:, 0] > 0
        out = torch.zeros(len(x), CLASSES, dtype=x.dtype)
        for expert, rows in ((m.a, sent), (m.b, ~sent)):
            out[rows] = expert(x[rows])
        return out

    return Net(run, a=mlp(), b=mlp()), vectors(), ce


@case("batch in the second dimension", must=True, options={"batch_first": False}, paths=("own loop", "ddp"))
def _():
    x, y = sequences()
    parts = {"fc": nn.Linear(FEATURES, 6), "out": nn.Linear(6, CLASSES)}
    return Net(lambda m, x: m.out(m.fc(x).tanh()).mean(0), **parts), (x.transpose(0, 1), y), ce


@case("batch in the second dimension and not said so", 2, fast=True, paths=("fit",))
def _():
    x, y = torch.randn(9, 9, FEATURES), labels()
    return Net(lambda m, x: m.net(x).mean(0), net=mlp()), (x, y), ce


@case("batch moved to the second dimension inside")
def _():
    parts = {"fc": nn.Linear(FEATURES, 6), "out": nn.Linear(6, CLASSES)}
    return Net(lambda m, x: m.out(m.fc(x.transpose(0, 1)).tanh().mean(0)), **parts), sequences(), ce
