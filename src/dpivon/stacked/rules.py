"""The rows of a stack: blocks of runs of one method, under the update rules of the registry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpivon.methods import METHODS
from dpivon.optim.average import average_update, spread_update
from dpivon.optim.curvature import CurvatureEstimator, Matrices, resolve
from dpivon.optim.rule import UpdateRule

State = dict[str, Tensor]

#: What a stack fills in unless an option says otherwise: N, the run's own b, the size of its first weights.
FILLED = ("ess", "batch_size", "scale")


def stackable() -> list[str]:
    """The methods of the registry that can be stacked: those that are an update rule."""
    return [name for name, method in METHODS.items() if method.rule is not None]


def rule_of(method: str, curvature: str = "", matrices: Matrices = ()) -> UpdateRule:
    """The rule of a method with another estimator, if one is named, on rows made of these tensors."""
    rule: Any = METHODS[method].rule
    if estimator_of(method) is not None:
        rule = replace(rule, estimator=resolve(curvature) if curvature else rule.estimator, matrices=matrices)
    made: UpdateRule = rule
    return made


def estimator_of(method: str) -> CurvatureEstimator | None:
    """The curvature estimator of a method; None where it has none."""
    return getattr(METHODS[method].rule, "estimator", None)


def defaults_of(method: str) -> dict[str, float]:
    """The hyperparameters of a method besides ``lr`` and what is filled in."""
    return {key: value for key, value in rule_of(method).defaults.items() if key not in FILLED}


@dataclass(frozen=True)
class Rows:
    """A rule over rows [K, P]; ``averaged`` keeps the average of their iterates beside them, ``traced`` their spread.

    Pure: tensors in, tensors out. A rule that draws gets the posterior stream.
    """

    rule: UpdateRule
    averaged: bool = False
    traced: bool = False

    def start(self, mean: Tensor, hyper: State) -> State:
        state = self.rule.start(mean, hyper)
        state |= {"average": mean.clone()} if self.averaged else {}
        return state | ({"spread": torch.zeros_like(mean)} if self.traced else {})

    def theta(self, state: State, noise: Tensor, hyper: State) -> Tensor:
        """Where gradients are taken: at the mean, unless the rule perturbs it."""
        perturbation = getattr(self.rule, "perturbation", None)
        return state["mean"] if perturbation is None else state["mean"] + perturbation(state, noise, hyper)

    def step(self, state: State, g: Tensor, noise: Tensor, t: Tensor, hyper: State) -> State:
        own = {key: value for key, value in state.items() if key not in ("average", "spread")}
        new = self.rule.step(own, g, t=t, noise_variance=hyper["noise_variance"], normal=noise, hyper=hyper)
        if self.averaged:
            before, decay = state["average"], hyper["ema"]
            new["average"] = average_update(before, new["mean"], decay=decay, t=t)
            if self.traced:
                new["spread"] = spread_update(state["spread"], before, new["mean"], decay=decay, t=t)
        return new
