"""Methods that train a point: DP-SGD, DP-Adam and the DPAGD family."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from dpivon.errors import bad
from dpivon.methods.base import Method, Setup
from dpivon.optim.point import ADAGRAD, ADAMBC, DPAGD, PHI, PSI, RMSPROP, SGD, Adam, AdamW, Moment
from dpivon.optim.rule_optimizer import RuleOptimizer

#: Every number that some φ or ψ may ask for; None takes its own default.
_NUMBERS = ("momentum", "beta1", "beta2", "floor", "relative_floor", "nu", "cap", "weight_decay")


def _moment(kind: str, value: Any, known: dict[str, Moment]) -> Moment:
    found = known.get(value) if isinstance(value, str) else value
    if not isinstance(found, Moment):
        fix = f"Use one of {', '.join(map(repr, known))}, or a dpivon.optim.point.Moment"
        raise bad(kind, value, "is not known", fix)
    return found


def _dpagd(model: nn.Module, setup: Setup) -> tuple[nn.Module, Optimizer]:
    rule = DPAGD(_moment("phi", setup.options["phi"], PHI), _moment("psi", setup.options["psi"], PSI))
    numbers = {key: setup.options[key] for key in _NUMBERS if setup.options[key] is not None}
    return model, RuleOptimizer(model.parameters(), rule, lr=setup.lr, **numbers)


METHODS = (
    Method(
        name="dp-sgd",
        title="DP-SGD",
        summary="SGD with momentum, or Nesterov's, on released gradients",
        choose="the first baseline; the noise does not rescale its steps",
        reference="Abadi et al. 2016",
        lr=0.1,
        rule=SGD(),
    ),
    Method(
        name="dp-adam",
        title="DP-Adam",
        summary="Adam on released gradients",
        choose="transformers and other badly scaled networks",
        reference="Kingma and Ba 2015; Zhou et al. 2020",
        lr=0.01,
        rule=Adam(),
    ),
    Method(
        name="dp-adamw",
        title="DP-AdamW",
        summary="Adam with decoupled weight decay",
        choose="as DP-Adam, where weight decay matters: fine-tuning",
        reference="Loshchilov and Hutter 2019",
        lr=0.01,
        rule=AdamW(),
    ),
    Method(
        name="dpagd",
        title="DPAGD",
        summary="the general adaptive step θ − α φ/(√min(ψ, λ) + ν)",
        choose="to study adaptivity: any φ, any ψ, the cap λ",
        reference="Zhou et al. 2020",
        lr=0.01,
        rule=DPAGD(),
        build=_dpagd,
        defaults={"phi": "average", "psi": "square-average", **dict.fromkeys(_NUMBERS)},
    ),
    Method(
        name="dp-rmsprop",
        title="DP-RMSProp",
        summary="DPAGD with φ = g, ψ the running average of g²",
        choose="DP-Adam with one buffer less",
        reference="Tieleman and Hinton 2012; Zhou et al. 2020",
        lr=0.003,
        rule=RMSPROP,
    ),
    Method(
        name="dp-adagrad",
        title="DP-AdaGrad",
        summary="DPAGD with φ = g, ψ the sum of all g²",
        choose="convex problems; the step decays as 1/√t by itself",
        reference="Duchi et al. 2011; Zhou et al. 2020",
        lr=0.1,
        rule=ADAGRAD,
    ),
    Method(
        name="dp-adambc",
        title="DP-AdamBC",
        summary="DP-Adam less the noise's variance in its second moment",
        choose="sparse or badly scaled gradients, where DP-Adam's denominator is all noise",
        reference="Tang et al. 2024",
        lr=0.003,
        rule=ADAMBC,
    ),
)
