"""Forward passes that leave something behind: in parameters, buffers, attributes, or outside of the model."""

from __future__ import annotations

import torch
from attack_case import CLASSES, FEATURES, Net, case, ce, mlp, tokens, vectors
from torch import nn


@case("embedding with max_norm", 1, fast=True)
def _():
    parts = {"emb": nn.Embedding(60, 6, max_norm=1.0), "out": nn.Linear(6, CLASSES)}
    return Net(lambda m, x: m.out(m.emb(x).mean(1)), **parts), tokens(vocabulary=60), ce


@case("frozen embedding with max_norm", 1)
def _():
    emb = nn.Embedding(60, 6, max_norm=1.0).requires_grad_(False)
    return Net(lambda m, x: m.out(m.emb(x).mean(1)), emb=emb, out=nn.Linear(6, CLASSES)), tokens(vocabulary=60), ce


@case("EmbeddingBag with max_norm", 1)
def _():
    parts = {"bag": nn.EmbeddingBag(60, 6, max_norm=1.0), "out": nn.Linear(6, CLASSES)}
    return Net(lambda m, x: m.out(m.bag(x)), **parts), tokens(vocabulary=60), ce


@case("functional embedding with max_norm", 1)
def _():
    run = lambda m, x: m.out(nn.functional.embedding(x, m.table, max_norm=1.0).mean(1))  # noqa: E731
    return Net(run, table=nn.Parameter(torch.randn(60, 6)), out=nn.Linear(6, CLASSES)), tokens(vocabulary=60), ce


def _model(write, **more):
    """An ordinary network whose forward calls ``write(m, h)`` on the way."""

    def run(m, x):
        h = m.fc(x).tanh()
        write(m, h.detach())
        return m.out(h)

    return Net(run, fc=nn.Linear(FEATURES, 6), out=nn.Linear(6, CLASSES), **more)


def _in_parameter(m, h):
    with torch.no_grad():
        m.fc.bias.add_(1e-3 * h.mean(0))


def _in_parameter_data(m, h):
    m.fc.weight.data[:, 0] += 1e-3 * h.mean(0)


def _in_frozen(m, h):
    m.fixed.data.copy_(h.mean(0))


def _in_buffer(m, h):
    m.seen.mul_(0.9).add_(h.mean(0))


def _new_buffer(m, h):
    m.seen = m.seen + h.mean(0)


def _in_buffer_data_later(m, h):
    m.passes += 1
    if m.passes > 1:
        m.seen.data.copy_(h.mean(0))


def _in_parameter_later(m, h):
    m.passes += 1
    if m.passes > 1:
        m.fc.weight.data[0, 0] = float(h.mean())


def _attribute(m, h):
    m.last = h.mean(0)


def _number(m, h):
    m.total = m.total + float(h.sum())


def _in_list(m, h):
    m.history.append(float(h.mean()))


def _in_dict(m, h):
    m.cache["hidden"] = h


def _through_numpy(m, h):
    m.seen.numpy()[:] = h.mean(0).numpy()


def _of_a_child(m, h):
    m.out.last_input = h


def _six():
    return torch.zeros(6)


_WRITES = {
    "a parameter written in place by forward": (_in_parameter, {}),
    "a parameter's .data written by forward": (_in_parameter_data, {}),
    "a parameter's .data written from the second pass on": (_in_parameter_later, {"passes": 0}),
    "a frozen parameter's .data written by forward": (_in_frozen, {"fixed": None}),
    "a buffer written in place by forward": (_in_buffer, {"seen": None}),
    "a buffer replaced by forward": (_new_buffer, {"seen": None}),
    "a buffer's .data written from the second pass on": (_in_buffer_data_later, {"seen": None, "passes": 0}),
    "a buffer written through numpy": (_through_numpy, {"seen": None}),
    "the last activations kept as an attribute": (_attribute, {"last": 0}),
    "a running sum kept as a number": (_number, {"total": 0.0}),
    "a history kept in a list": (_in_list, {"history": list}),
    "activations kept in a dictionary": (_in_dict, {"cache": dict}),
    "activations kept on a child module": (_of_a_child, {}),
}
for _name, (_write, _more) in _WRITES.items():

    @case(_name, 13 if "kept" in _name else 1, fast="second pass" in _name or "last activations" in _name)
    def _(write=_write, more=_more):
        made = {key: value() if isinstance(value, type) else value for key, value in more.items()}
        if "seen" in made:
            made["seen"] = _six()
        if "fixed" in made:
            made["fixed"] = nn.Parameter(_six(), requires_grad=False)
        return _model(write, **made), vectors(), ce


@case("a running mean kept as an attribute and used", 13, fast=True)
def _():
    def run(m, x):
        m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
        return m.net(x - m.mean)

    return Net(run, net=mlp(), mean=0.0), vectors(), ce


@case("a running mean kept in a closure", 13)
def _():
    kept = {"mean": 0.0}

    def run(m, x):
        kept["mean"] = 0.9 * kept["mean"] + 0.1 * x.detach().mean(0)
        return m.net(x - kept["mean"])

    return Net(run, net=mlp()), vectors(), ce


@case("a counter of passes kept as an attribute", 13)
def _():
    def run(m, x):
        m.passes += 1
        return m.net(x)

    return Net(run, net=mlp(), passes=0), vectors(), ce


@case("vector quantisation with codes that follow the batch", 1)
def _():
    def run(m, x):
        h = m.fc(x)
        nearest = torch.cdist(h, m.codes.to(h.dtype)).argmin(1)
        with torch.no_grad():
            m.codes.index_add_(0, nearest, 0.01 * h.detach().to(m.codes.dtype))
        return m.out(h + (m.codes[nearest].to(h.dtype) - h).detach())

    parts = {"fc": nn.Linear(FEATURES, 6), "out": nn.Linear(6, CLASSES), "codes": torch.randn(4, 6)}
    return Net(run, **parts), vectors(), ce
