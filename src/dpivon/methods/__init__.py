"""The registry of methods, from which stacks, the command line, the demo and the documentation derive."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dpivon.errors import bad, check_number, check_whole
from dpivon.methods import bayesian, point
from dpivon.methods.base import Learner, Method, Setup
from dpivon.optim.average import EMA, window_decay

#: Every method by its name, in the order of the tables.
METHODS: dict[str, Method] = {m.name: m for m in (*point.METHODS, *bayesian.METHODS)}


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
    chosen = describe(name)
    n = check_whole("dataset_size", dataset_size, "Use the public number of training examples", at_least=1)
    lr = check_number("lr", chosen.lr if lr is None else lr, "Use a non-negative step size", at_least=0.0)
    unknown = sorted(set(options) - set(chosen.defaults))
    if unknown:
        raise bad(
            unknown[0],
            options[unknown[0]],
            f"is not an option of {name!r}",
            f"It has {', '.join(map(repr, chosen.defaults)) or 'none besides lr and ema'}",
        )
    given = {**chosen.defaults, **options}
    windowed = ema is None and chosen.averages
    if windowed:
        ema = window_decay(given.get("steps", 0.0))
    if ema is None and trace:
        raise bad("trace", trace, "is of averaged iterates, and none are averaged", "Give ema= too, such as 0.99")
    made, optimizer = chosen.build(model, Setup(lr, n, generator, given, chosen.rule))
    average = None if ema is None else EMA(optimizer, ema, chosen.trace if trace is None else trace)
    return Learner(chosen, made, optimizer, average, windowed=windowed)


__all__ = ["METHODS", "Learner", "Method", "Setup", "describe", "method"]
