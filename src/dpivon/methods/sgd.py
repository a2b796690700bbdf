"""DP-SGD."""

from __future__ import annotations

from dpivon.methods.base import Method, build_rule, rule_defaults
from dpivon.optim.sgd_rule import SGD

_RULE = SGD()

METHODS = (
    Method(
        name="dp-sgd",
        title="DP-SGD",
        summary="SGD with momentum, or Nesterov's, on released gradients",
        optimises="weights",
        posterior="none: a point",
        predicts="one pass",
        choose="the first baseline; the noise does not rescale its steps",
        reference="Abadi et al. 2016",
        lr=0.1,
        build=build_rule(_RULE),
        defaults=rule_defaults(_RULE),
    ),
)
