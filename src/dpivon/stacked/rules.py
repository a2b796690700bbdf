"""The methods a stack can train, each a block of rows under the update rules of :mod:`dpivon.optim`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dpivon.optim.adam_rule import AdamState, adam_update
from dpivon.optim.curvature import CorrectedSquaredGradient, CurvatureEstimator, Evidence
from dpivon.optim.ivon_rule import IVONState, ivon_update, std
from dpivon.optim.sgd_rule import SGDState, sgd_update

Rows = dict[str, Tensor]


class Rule(Protocol):
    """State of some rows, θ from it, and the step that a released gradient makes of it. Pure: tensors in, tensors out."""

    samples: bool

    def start(self, mean: Tensor, hyper: Rows) -> Rows: ...

    def theta(self, state: Rows, noise: Tensor, hyper: Rows) -> Tensor: ...

    def step(self, state: Rows, g: Tensor, noise: Tensor, t: Tensor, hyper: Rows) -> Rows: ...


@dataclass(frozen=True)
class SGD:
    """DP-SGD with momentum."""

    samples = False

    def start(self, mean: Tensor, hyper: Rows) -> Rows:
        return {"mean": mean, "velocity": torch.zeros_like(mean)}

    def theta(self, state: Rows, noise: Tensor, hyper: Rows) -> Tensor:
        return state["mean"]

    def step(self, state: Rows, g: Tensor, noise: Tensor, t: Tensor, hyper: Rows) -> Rows:
        new = sgd_update(
            SGDState(**state), g, lr=hyper["lr"], momentum=hyper["momentum"], weight_decay=hyper["weight_decay"]
        )
        return vars(new)


@dataclass(frozen=True)
class Adam:
    """DP-Adam."""

    samples = False

    def start(self, mean: Tensor, hyper: Rows) -> Rows:
        return {"mean": mean, "momentum": torch.zeros_like(mean), "second": torch.zeros_like(mean)}

    def theta(self, state: Rows, noise: Tensor, hyper: Rows) -> Tensor:
        return state["mean"]

    def step(self, state: Rows, g: Tensor, noise: Tensor, t: Tensor, hyper: Rows) -> Rows:
        beta1, beta2 = hyper["beta1"], hyper["beta2"]
        new = adam_update(
            AdamState(**state),
            g,
            lr=hyper["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=hyper["weight_decay"],
            debias1=_debias(beta1, t),
            debias2=_debias(beta2, t),
        )
        return vars(new)


@dataclass(frozen=True)
class IVONRows:
    """DP-IVON with any curvature estimator."""

    estimator: CurvatureEstimator
    samples = True

    def start(self, mean: Tensor, hyper: Rows) -> Rows:
        return {"mean": mean, "momentum": torch.zeros_like(mean), "hess": hyper["hess_init"].expand_as(mean).clone()}

    def theta(self, state: Rows, noise: Tensor, hyper: Rows) -> Tensor:
        return state["mean"] + noise * std(state["hess"], ess=hyper["ess"], weight_decay=hyper["weight_decay"])

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
        )
        h_hat: Any = self.estimator(evidence)
        new = ivon_update(
            IVONState(**state),
            g,
            h_hat,
            lr=hyper["lr"],
            beta1=hyper["beta1"],
            beta2=hyper["beta2"],
            weight_decay=weight_decay,
            debias=_debias(hyper["beta1"], t),
        )
        return vars(new)


def _debias(beta: Tensor, t: Tensor) -> Tensor:
    """1 − βᵗ, in double precision: at β = .99999 a float loses it."""
    return (1.0 - beta.double() ** t.double()).float()


RULES: dict[str, Rule] = {"dp-sgd": SGD(), "dp-adam": Adam(), "dp-ivon-gradsq": IVONRows(CorrectedSquaredGradient())}

DEFAULTS: dict[str, dict[str, float]] = {
    "dp-sgd": {"momentum": 0.9, "weight_decay": 1e-4},
    "dp-adam": {"beta1": 0.9, "beta2": 0.999, "weight_decay": 1e-4},
    "dp-ivon-gradsq": {"beta1": 0.9, "beta2": 0.99999, "weight_decay": 1e-4, "hess_init": 1.0},
}
