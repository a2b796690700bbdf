"""The methods a stack can train, each a block of rows under the update rules of :mod:`dpivon.optim`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from dpivon.optim.adam_rule import Adam, AdamW
from dpivon.optim.average import average_update, spread_update
from dpivon.optim.calm_rule import Calm
from dpivon.optim.curvature import (
    CorrectedSquaredGradient,
    CurvatureEstimator,
    Evidence,
    Matrices,
    Reparameterised,
    SquaredGradient,
    estimate,
    memory_of,
    remembered,
    resolve,
)
from dpivon.optim.dpagd_rule import ADAGRAD, ADAMBC, DPAGD, RMSPROP
from dpivon.optim.ivon_rule import IVONState, ivon_update, std
from dpivon.optim.rule import UpdateRule, debias
from dpivon.optim.sgd_rule import SGD
from dpivon.optim.sgld_rule import PSGLD, SGLD
from dpivon.optim.steady_rule import Steady

Rows = dict[str, Tensor]


class Rule(Protocol):
    """State of some rows, θ from it, and the step that a released gradient makes of it. Pure: tensors in, tensors out."""

    def start(self, mean: Tensor, hyper: Rows) -> Rows: ...

    def theta(self, state: Rows, noise: Tensor, t: Tensor, hyper: Rows) -> Tensor: ...

    def step(self, state: Rows, g: Tensor, noise: Tensor, t: Tensor, hyper: Rows) -> Rows: ...


@dataclass(frozen=True)
class PointRows:
    """Rows that train at their mean, under any rule of :mod:`dpivon.optim`; one that draws gets the posterior stream."""

    rule: UpdateRule

    def start(self, mean: Tensor, hyper: Rows) -> Rows:
        return self.rule.start(mean, hyper)

    def theta(self, state: Rows, noise: Tensor, t: Tensor, hyper: Rows) -> Tensor:
        return state["mean"]

    def step(self, state: Rows, g: Tensor, noise: Tensor, t: Tensor, hyper: Rows) -> Rows:
        variance = hyper["noise_variance"]
        return self.rule.step(state, g, t=t, noise_variance=variance, normal=noise, hyper=hyper)


@dataclass(frozen=True)
class AveragedRows:
    """Any rows, with the average of their iterates, and if ``traced`` their spread, kept beside them
    (:mod:`dpivon.optim.average`)."""

    rule: Rule
    traced: bool = False

    def start(self, mean: Tensor, hyper: Rows) -> Rows:
        spread = {"spread": torch.zeros_like(mean)} if self.traced else {}
        return {**self.rule.start(mean, hyper), "average": mean.clone(), **spread}

    def theta(self, state: Rows, noise: Tensor, t: Tensor, hyper: Rows) -> Tensor:
        return self.rule.theta(_without_average(state), noise, t, hyper)

    def step(self, state: Rows, g: Tensor, noise: Tensor, t: Tensor, hyper: Rows) -> Rows:
        new = self.rule.step(_without_average(state), g, noise, t, hyper)
        before, decay = state["average"], hyper["ema"]
        own = {"average": average_update(before, new["mean"], decay=decay, t=t)}
        if self.traced:
            own["spread"] = spread_update(state["spread"], before, new["mean"], decay=decay, t=t)
        return {**new, **own}


def _without_average(state: Rows) -> Rows:
    return {key: value for key, value in state.items() if key not in ("average", "spread")}


@dataclass(frozen=True)
class IVONRows:
    """DP-IVON with any curvature estimator; ``matrices`` says where tensors are in a row, for those that pool over them."""

    estimator: CurvatureEstimator
    matrices: Matrices = ()

    def start(self, mean: Tensor, hyper: Rows) -> Rows:
        own = {name: torch.zeros_like(mean) for name in memory_of(self.estimator)}
        hess = hyper["hess_init"].expand_as(mean).clone()
        return {"mean": mean, "momentum": torch.zeros_like(mean), "hess": hess, **own}

    def theta(self, state: Rows, noise: Tensor, t: Tensor, hyper: Rows) -> Tensor:
        width = std(state["hess"], ess=hyper["ess"], weight_decay=hyper["weight_decay"])
        return state["mean"] + noise * width

    def step(self, state: Rows, g: Tensor, noise: Tensor, t: Tensor, hyper: Rows) -> Rows:
        ess, weight_decay, hess = hyper["ess"], hyper["weight_decay"], state["hess"]
        evidence: Evidence[Tensor] = Evidence(
            g=g,
            g_squared=g.square(),
            g_perturbation=g * noise * std(hess, ess=ess, weight_decay=weight_decay),
            noise_variance=hyper["noise_variance"],
            hess=hess,
            ess=ess,
            weight_decay=weight_decay,
            batch_size=hyper["batch_size"],
            t=t,
            decay=hyper["curvature_decay"],
            memory={name: state[name] for name in memory_of(self.estimator)},
        )
        evidence = remembered(self.estimator, evidence)
        new = ivon_update(
            IVONState(mean=state["mean"], momentum=state["momentum"], hess=hess),
            g,
            estimate(self.estimator, evidence, self.matrices),
            lr=hyper["lr"],
            beta1=hyper["beta1"],
            beta2=hyper["beta2"],
            weight_decay=weight_decay,
            debias=debias(hyper["beta1"], t),
        )
        # Not vars(new): torch.compile 2.13 makes an empty dictionary of it.
        return {"mean": new.mean, "momentum": new.momentum, "hess": new.hess, **evidence.memory}


POINT_RULES: dict[str, UpdateRule] = {
    "dp-sgd": SGD(),
    "dp-adam": Adam(),
    "dp-adamw": AdamW(),
    "dpagd": DPAGD(),
    "dp-rmsprop": RMSPROP,
    "dp-adagrad": ADAGRAD,
    "dp-adambc": ADAMBC,
    "dp-sgld": SGLD(),
    "dp-psgld": PSGLD(),
    "dp-calm": Calm(),
    "dp-steady": Steady(),
}
_IVON_DEFAULTS = {
    "beta1": 0.9,
    "beta2": 0.99999,
    "weight_decay": 1e-4,
    "hess_init": 1.0,
    "curvature_decay": 0.99,
}

RULES: dict[str, Rule] = {
    **{name: PointRows(rule) for name, rule in POINT_RULES.items()},
    "dp-ivon-gradsq": IVONRows(CorrectedSquaredGradient()),
    "dp-ivon-gradsq-plain": IVONRows(SquaredGradient()),
    "dp-ivon-reparam": IVONRows(Reparameterised()),
}


def estimator_of(method: str) -> CurvatureEstimator | None:
    """The curvature estimator of a method; None where it has none."""
    rule = RULES[method]
    if isinstance(rule, PointRows):
        return rule.rule.estimator if isinstance(rule.rule, Calm) else None
    return rule.estimator if isinstance(rule, IVONRows) else None


def rows_of(method: str, curvature: str, matrices: Matrices) -> Rule:
    """The rule of a method with another estimator, if one is named, on rows made of these tensors."""
    rule, own = RULES[method], estimator_of(method)
    if own is None:
        return rule
    estimator = resolve(curvature) if curvature else own
    if isinstance(rule, IVONRows):
        return replace(rule, estimator=estimator, matrices=matrices)
    assert isinstance(rule, PointRows)
    assert isinstance(rule.rule, Calm)
    return PointRows(replace(rule.rule, estimator=estimator, matrices=matrices))


#: What a stack fills in unless an option says otherwise: N, the run's own b, the size of its first weights.
FILLED = ("ess", "batch_size", "scale")

#: The hyperparameters of each besides ``lr`` and what is filled in.
DEFAULTS: dict[str, dict[str, float]] = {
    name: {key: value for key, value in POINT_RULES[name].defaults.items() if key not in FILLED}
    if name in POINT_RULES
    else _IVON_DEFAULTS
    for name in RULES
}

#: Methods whose iterates are averaged unless ``ema`` is 0, and how much of their spread is width.
AVERAGED: dict[str, float] = {"dp-steady": 1.0}
