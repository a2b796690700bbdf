"""One private training run of a stack, as plain data, and the update rules of its rows: blocks of runs of one method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpivon.errors import bad, check_number, check_whole
from dpivon.methods import METHODS
from dpivon.optim.average import average_update, spread_update
from dpivon.optim.curvature import CurvatureEstimator, Matrices, resolve
from dpivon.optim.rule import UpdateRule, check_hyper

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


class Kind(NamedTuple):
    """What sets rows apart besides their numbers."""

    method: str
    averaged: bool
    curvature: str  # the estimator it names
    traced: bool


@dataclass(frozen=True)
class Run:
    """One private training run, as plain data.

    Attributes:
        method: a name of ``dpivon methods`` that can be stacked.
        seed: decides first weights, batches, noise and posterior samples. A secret, unless the data is public.
        noise_multiplier: σ.
        max_grad_norm: C.
        lr: the step size α, as in the paper: IVON's is not multiplied by h₀ + δ here.
        batch_size: the expected batch b.
        options: override the method's defaults (``beta1``, ``ess``, ``hess_init``, …). ``ema``, for every method, keeps an
            average of the iterates beside them: ``Stack.average``; ``trace`` adds so many times their spread to the
            posterior's variance. ``curvature`` names another estimator of :mod:`dpivon.optim.curvature` for a method that
            has one; all others are numbers.
    """

    method: str
    seed: int
    noise_multiplier: float
    max_grad_norm: float
    lr: float
    batch_size: int
    options: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.options, Mapping):
            raise bad("options", self.options, "are not options by name", 'Give a dictionary, such as {"ema": 0.99}')
        object.__setattr__(self, "options", dict(self.options))  # checked below, and not to be changed afterwards
        if self.method not in stackable():
            raise bad("method", self.method, "cannot be stacked", f"Use one of {', '.join(map(repr, stackable()))}")
        own = defaults_of(self.method)
        check_whole("seed", self.seed, "Use a whole number; it seeds the privacy noise, so keep it secret")
        check_number("lr", self.lr, "Use a positive step size", above=0.0)
        check_whole("batch_size", self.batch_size, "Use the expected batch", at_least=1)
        unknown = set(self.options) - set(own) - {"ess", "ema", "trace"}
        if "steps" in own:
            unknown -= {"scale"}
        if estimator_of(self.method) is not None:
            unknown -= {"curvature"}
        if unknown:
            raise bad("options", sorted(unknown), f"are not options of {self.method!r}", f"Use {sorted(own)}")
        for name, value in self.options.items():
            if name != "curvature":
                check_hyper(name, value)
        if self.options.get("trace") and not self.averaged:
            trace = self.options["trace"]
            raise bad("trace", trace, "is of averaged iterates, and none are averaged", "Give ema too, such as 0.99")
        if not isinstance(self.options.get("curvature", ""), str):
            raise bad("curvature", self.options["curvature"], "is not a name", "Name an estimator; a run is plain data")
        rule_of(self.method, self.kind.curvature)  # names an estimator that is unknown

    @property
    def averaged(self) -> bool:
        """Whether an average of its iterates is kept."""
        return "ema" in self.options or METHODS[self.method].averages

    @property
    def trace(self) -> float:
        """How many times their spread is width."""
        return float(self.options.get("trace", METHODS[self.method].trace))

    @property
    def kind(self) -> Kind:
        """Rows of one kind are updated together."""
        return Kind(self.method, self.averaged, str(self.options.get("curvature", "")), self.trace > 0)
