"""Losses: weighted, padded, smoothed, summed; inside the model and outside; and what rounding does to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from attack_case import CLASSES, FEATURES, Net, case, ce, ce_each, labels, mlp, sequences, square, square_each, vectors
from torch import Tensor, nn

import dpivon

_WEIGHTS = (8.0, 0.2, 1.0)


def _w(z: Tensor) -> Tensor:
    return torch.tensor(_WEIGHTS, dtype=z.dtype)


def _by_hand(z, y):
    w = _w(z)[y]
    return ce_each(z, y) * w / w.sum() * len(y)


def _weights_alone(z, y):
    return ce_each(z, y) * _w(z)[y]


def _by_batch_size(z, y):
    return ce_each(z, y) * len(y) / 8


def _by_share_of_class(z, y):
    return ce_each(z, y) / torch.bincount(y, minlength=CLASSES)[y].to(z.dtype)


def _focal(z, y):
    losses = ce_each(z, y)
    return (1 - (-losses).exp()).square() * losses


def _hardest(z, y):
    losses = ce_each(z, y)
    return torch.where(losses >= losses.detach().median(), losses, 0.0)


_EACH = {
    "weights over their sum, by hand": (_by_hand, 7, False),
    "class weights, plain mean": (_weights_alone, 7, True),
    "multiplied by the batch size": (_by_batch_size, 7, False),
    "divided by the class's share of the batch": (_by_share_of_class, 7, False),
    "focal loss": (_focal, "—", True),
    "only the hardest half of the batch": (_hardest, 13, False),
}
for _name, (_loss, _row, _must) in _EACH.items():

    @case(_name, _row, each=_loss, must=_must, fast=_row == 7 and "share" not in _name)
    def _(loss=_loss):
        return mlp(), vectors(), lambda z, y: loss(z, y).mean()

    @case(f"{_name}, through PerExampleLoss", _row, each=None, must=_must)
    def _(loss=_loss):
        return mlp(), vectors(), dpivon.PerExampleLoss(loss)


def _weighted(z, y):
    return F.cross_entropy(z, y, weight=_w(z))


@case("cross_entropy(weight=)", 7, each=None, fast=True)
def _():
    return mlp(), vectors(), _weighted


@case("cross_entropy(weight=) through PerExampleLoss", 7, must=True, each=None, fast=True)
def _():
    return mlp(), vectors(), lambda z, y: dpivon.PerExampleLoss(nn.CrossEntropyLoss(weight=_w(z)))(z, y)


@case("cross_entropy(weight=) in fit through PerExampleLoss", 7, must=True, paths=("fit", "stacked"),
      each=lambda z, y: dpivon.PerExampleLoss(nn.CrossEntropyLoss(weight=_w(z))).per_example(z, y))  # fmt: skip
def _():
    return mlp(), vectors(), _weighted


@case("nll_loss(weight=)", 7, each=None)
def _():
    return mlp(nn.Tanh()), vectors(), lambda z, y: F.nll_loss(z.log_softmax(1), y, weight=_w(z))


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Answer:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


for _name, _wrap in {"a dataclass": Output, "an object": Answer, "a dict": lambda z: {"z": z}}.items():

    @case(f"cross_entropy(weight=) of an output in {_name}", 7, whole=True, each=None)
    def _(wrap=_wrap):
        def loss(model, batch):
            out = model(batch[0])
            return _weighted(out["z"] if isinstance(out, dict) else out.logits, batch[1])

        return Net(lambda m, x: wrap(m.net(x)), net=mlp()), vectors(), loss


def _loss_inside(reduce):
    """The model takes labels and returns its loss, as Hugging Face's do."""

    def run(m, given):
        return {"loss": reduce(m.net(given["x"]), given["labels"])}

    x, y = vectors()
    return Net(run, net=mlp()), ({"x": x, "labels": y}, y), lambda model, batch: model(batch[0])["loss"]


@case("a plain mean loss inside the model", 7, whole=True, each=None, paths=("own loop", "ddp"))
def _():
    return _loss_inside(ce)


@case("cross_entropy(weight=) inside the model", 7, whole=True, each=None, paths=("own loop", "ddp"), fast=True)
def _():
    return _loss_inside(_weighted)


@case("weights over their sum inside the model", 7, whole=True, each=None, paths=("own loop", "ddp"))
def _():
    return _loss_inside(lambda z, y: _by_hand(z, y).mean())


@case('reduction="sum" under "mean"', 7, each=None, fast=True)
def _():
    return mlp(), vectors(), lambda z, y: F.cross_entropy(z, y, reduction="sum")


@case('reduction="sum" and said so', 7, each=None, must=True, options={"loss_reduction": "sum"})
def _():
    return mlp(), vectors(), lambda z, y: F.cross_entropy(z, y, reduction="sum")


@case('a mean under loss_reduction="sum"', 7, each=None, options={"loss_reduction": "sum"})
def _():
    return mlp(), vectors(), ce


@case("a sum over the expected batch, by hand", 7, each=None)
def _():
    return mlp(), vectors(), lambda z, y: F.cross_entropy(z, y, reduction="sum") / 9


def _padded():
    x, _ = sequences()
    y = labels(9, 5)
    for i in range(9):
        y[i, 1 + i % 5 :] = -100
    return x, y


@case("-100 padding, mean over the batch's tokens", 7, each=None, fast=True)
def _():
    return mlp(), _padded(), lambda z, y: F.cross_entropy(z.transpose(1, 2), y)


@case("-100 padding, mean per example", 7, must=True, each=lambda z, y: _per_example(z, y))
def _():
    return mlp(), _padded(), lambda z, y: _per_example(z, y).mean()


def _per_example(z, y):
    losses = F.cross_entropy(z.transpose(1, 2), y, reduction="none")
    return losses.sum(1) / (y != -100).sum(1).clamp(min=1)


@case("-100 padding, by hand over the batch's tokens", 7, each=None)
def _():
    def loss(z, y):
        losses = F.cross_entropy(z.transpose(1, 2), y, reduction="none")
        return losses.sum() / (y != -100).sum()

    return mlp(), _padded(), loss


@case("label smoothing", must=True, each=lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1, reduction="none"))
def _():
    return mlp(), vectors(), lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1)


@case("probabilities as targets", each=ce_each)
def _():
    return mlp(), (vectors()[0], torch.rand(9, CLASSES).softmax(1)), ce


@case("a weight per example, its own", each=lambda z, t: ce_each(z, t[:, 0].long()) * t[:, 1])
def _():
    x, y = vectors()
    return (
        mlp(),
        (x, torch.stack([y.float(), torch.rand(9) + 0.5], 1)),
        lambda z, t: (ce_each(z, t[:, 0].long()) * t[:, 1]).mean(),
    )


@case(
    "a weight per example, over their sum", 7, each=lambda z, t: ce_each(z, t[:, 0].long()) * t[:, 1] / t[:, 1].mean()
)
def _():
    x, y = vectors()
    return (
        mlp(),
        (x, torch.stack([y.float(), torch.rand(9) + 0.5], 1)),
        lambda z, t: (ce_each(z, t[:, 0].long()) * t[:, 1]).sum() / t[:, 1].sum(),
    )


@case("Huber loss", must=True, each=lambda z, y: F.huber_loss(z[:, 0], y.to(z.dtype), reduction="none"))
def _():
    return mlp(), vectors(), lambda z, y: F.huber_loss(z[:, 0], y.to(z.dtype))


# ---- rounding

_FP32 = 1e9  # what cancels in fp32 has no digits left to compare; the bound holds all the same


def _difference(k):
    """(l(x₀) − l(x₁)) · k of equal tokens: every true gradient is 0, and large ones cancel."""
    parts = {"l": nn.Linear(FEATURES, 6)}
    x = torch.randn(9, 1, FEATURES).repeat(1, 2, 1) * 1e3
    y = torch.zeros(9)
    return Net(lambda m, x: (m.l(x)[:, 0] - m.l(x)[:, 1]) * k, **parts), (x, y), square


@case("gradients that cancel exactly", 5, fast=True, bounds=(1e-3, 1.0), tolerance=_FP32)
def _():
    net, batch, _ = _difference(1e4)
    return net, (batch[0], batch[1] + 1), square


@case("gradients of two tokens that nearly cancel", 5, bounds=(1e-3, 1e-1, 1.0), fast=True, tolerance=_FP32)
def _():
    net, (x, y), _ = _difference(1e2)
    x[:, 1] *= 1 + 1e-5
    return net, (x, y + 1), square


@case("a layer used twice whose gradients cancel", 5, bounds=(1e-3, 1.0), tolerance=_FP32)
def _():
    x = torch.randn(9, FEATURES) * 1e3
    run = lambda m, x: (m.l(x) - m.l(x + 1e-4)) * 1e4  # noqa: E731
    return Net(run, l=nn.Linear(FEATURES, 6)), (x, torch.ones(9)), square


@case("inputs with a large common offset", 5)
def _():
    x, y = sequences()
    run = lambda m, x: m.out((m.l(x).diff(dim=1)).mean(1))  # noqa: E731
    return Net(run, l=nn.Linear(FEATURES, 6), out=nn.Linear(6, CLASSES)), (x + 1e3, y), ce


def _bf16():
    return torch.autocast("cpu", torch.bfloat16)


_HALF = {"around": _bf16, "tolerance": 0.1, "each": None}


@case("bf16 autocast, mean loss in fp32", 9, fast=True, **_HALF)
def _():
    return mlp(), vectors(), lambda z, y: ce(z.float(), y)


@case("bf16 autocast, mean of squares in bf16", 9, **_HALF)
def _():
    return mlp(), vectors(), lambda z, y: z.square().sum(1).mean()


@case("bf16 autocast, one output, alike rows", 9, **_HALF)
def _():
    return nn.Linear(FEATURES, 1), vectors(), lambda z, y: z.mean()


@case("bf16 autocast on a convolution", 9, **_HALF)
def _():
    from attack_case import images

    return (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, CLASSES)),
        images(),
        lambda z, y: ce(z.float(), y),
    )


@case("a model in fp64", must=True, tolerance=1e-5, each=None)
def _():
    x, y = vectors()
    return mlp().double(), (x.double(), y), ce


@case("parameters in bf16", 9, tolerance=0.1, each=None)
def _():
    x, y = vectors()
    return mlp().bfloat16(), (x.bfloat16(), y), lambda z, y: ce(z.float(), y)


@case("squared error of a deep product", 5, each=square_each)
def _():
    return nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(5)]), vectors(), square
