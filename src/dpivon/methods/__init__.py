"""Every method by its name, under one contract: see :mod:`dpivon.methods.base`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dpivon.errors import bad
from dpivon.methods import adam, bbp, calm, dpagd, dropout, ivon, langevin, sgd
from dpivon.methods.base import Learner, Method, Setup, learner

#: Every method by its name, in the order of the tables.
METHODS: dict[str, Method] = {
    m.name: m for family in (sgd, adam, dpagd, ivon, calm, langevin, bbp, dropout) for m in family.METHODS
}


def describe(name: str) -> Method:
    """The method of this name."""
    if not isinstance(name, str) or name not in METHODS:
        raise bad("name", name, "is not a known method", f"Use one of {', '.join(map(repr, METHODS))}")
    return METHODS[name]


def method(
    name: str,
    model: nn.Module,
    *,
    dataset_size: int,
    lr: float | None = None,
    ema: float | None = None,
    trace: float | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Learner:
    """The method ``name`` at work on ``model``.

    >>> learner = dpivon.method("dp-adambc", model, dataset_size=len(train_set), ema=0.95)

    Args:
        name: one of those that ``dpivon methods`` lists.
        model: the network. ``learner.model`` is the one to train: some methods convert their layers.
        dataset_size: the public number of training examples N.
        lr: step size; None takes the method's.
        ema: decay of an average of the iterates, which then is what predicts; None for the method's own, mostly none.
        trace: how many times the spread of the averaged iterates is added to the posterior's variance.
        generator: source of θ-samples and Langevin noise, not of the privacy noise.
        **options: the method's own, by the names in ``describe(name).defaults``.
    """
    return learner(
        describe(name), model, dataset_size=dataset_size, lr=lr, ema=ema, trace=trace, generator=generator, **options
    )


__all__ = ["METHODS", "Learner", "Method", "Setup", "describe", "method"]
