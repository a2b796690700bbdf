"""DP-Adam and DP-AdamW."""

from __future__ import annotations

from dpivon.methods.base import Method, build_rule, rule_defaults
from dpivon.optim.adam_rule import Adam, AdamW

METHODS = (
    Method(
        name="dp-adam",
        title="DP-Adam",
        summary="Adam on released gradients",
        optimises="weights",
        posterior="none: a point",
        predicts="one pass",
        choose="transformers and other badly scaled networks",
        reference="Kingma and Ba 2015; Zhou et al. 2020",
        lr=0.01,
        build=build_rule(Adam()),
        defaults=rule_defaults(Adam()),
    ),
    Method(
        name="dp-adamw",
        title="DP-AdamW",
        summary="Adam with decoupled weight decay",
        optimises="weights",
        posterior="none: a point",
        predicts="one pass",
        choose="as DP-Adam, where weight decay matters: fine-tuning",
        reference="Loshchilov and Hutter 2019",
        lr=0.01,
        build=build_rule(AdamW()),
        defaults=rule_defaults(AdamW()),
    ),
)
