"""DP-MC-Dropout."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from dpivon.dropout import MCDropout, dropouts, with_dropout
from dpivon.methods.base import Method, Setup, rule_defaults
from dpivon.optim.adam_rule import Adam


def _build(model: nn.Module, setup: Setup) -> tuple[nn.Module, Optimizer]:
    options = dict(setup.options)
    p = options.pop("p")
    made = model if dropouts(model) else with_dropout(model, p)
    return made, MCDropout(made.parameters(), Adam(), lr=setup.lr, **options)


METHODS = (
    Method(
        name="dp-mc-dropout",
        title="DP-MC-Dropout",
        summary="DP-Adam with dropout that stays live in prediction",
        optimises="weights",
        posterior="the network with units dropped at random",
        predicts="average over dropout masks",
        choose="uncertainty for the price of dropout; its width is chosen by p, not learned",
        reference="Gal and Ghahramani 2016",
        lr=0.01,
        build=_build,
        defaults={"p": 0.05, **rule_defaults(Adam())},
        samples=32,
    ),
)
