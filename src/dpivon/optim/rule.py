"""What an update rule is: the state of some weights and a released gradient in, the next state out. Pure.

A rule computes with whatever it is given: a :class:`~dpivon.optim.tensors.TensorList` holding all parameters of a model
(:class:`~dpivon.optim.RuleOptimizer`), or K rows of a stack, whose hyperparameters are then columns [K, 1] that broadcast.
It is written once and is the same function in both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from dpivon.errors import bad, check_number
from dpivon.optim.tensors import TensorList, Values

Hyper = Mapping[str, Any]

#: The default of a hyperparameter that has none: NaN, which no check lets pass.
REQUIRED = math.nan


class UpdateRule(Protocol):
    """``defaults`` names every hyperparameter besides ``lr``; ``draws`` says that a step needs standard normals of its own.

    ``ess`` among the defaults is the public number of training examples N; a stack fills it in.
    """

    @property
    def name(self) -> str: ...

    @property
    def defaults(self) -> Mapping[str, float]: ...

    @property
    def draws(self) -> bool: ...

    def start(self, mean: Values, hyper: Hyper) -> dict[str, Values]:
        """The state before the first step: ``"mean"`` and whatever else the rule remembers."""
        ...

    def step(
        self,
        state: dict[str, Values],
        g: Values,
        *,
        t: Any,
        noise_variance: Any,
        normal: Values | None,
        hyper: Hyper,
    ) -> dict[str, Values]:
        """The state after step t = 1, 2, … with gradient g, whose noise has this variance (0 without privacy)."""
        ...


def takes_prior(rule: UpdateRule) -> bool:
    """Whether its steps pull towards a prior's mean (:mod:`dpivon.optim.prior`)."""
    return bool(getattr(rule, "takes_prior", False))


def debias(beta: Any, t: Any) -> Any:
    """1 − βᵗ; 1 where β = 1, whose average never moves from its start. In double: at β = .99999 a float loses it.

    t is a number, a list of them (one per tensor of a TensorList), or a tensor on the device of β.
    """
    if isinstance(t, list):
        return [debias(beta, one) for one in t]
    if isinstance(t, Tensor):
        factor = 1.0 - beta.double() ** t.double()
        return torch.where(beta == 1.0, 1.0, factor).to(beta.dtype)
    return 1.0 if beta == 1.0 else 1.0 - math.pow(beta, t)


def full_like(values: Values, number: Any) -> Values:
    """Every coordinate at ``number``; a column [K, 1] gives each row its own."""
    if isinstance(values, TensorList):
        return TensorList([torch.full_like(v, number, requires_grad=False) for v in values])
    return torch.zeros_like(values, requires_grad=False) + number


# ---- hyperparameters: one name, one meaning, one range everywhere

_SHARE: dict[str, Any] = {"at_least": 0.0, "at_most": 1.0}
_BELOW_ONE: dict[str, Any] = {"at_least": 0.0, "below": 1.0}
_POSITIVE: dict[str, Any] = {"above": 0.0}
_NOT_NEGATIVE: dict[str, Any] = {"at_least": 0.0}
_MOST = 3.4e38  # rows of a stack hold them in fp32, where more would be infinite

#: name: (range, what to use instead)
_RANGES: dict[str, tuple[dict[str, Any], str]] = {
    "lr": (_NOT_NEGATIVE, "Use a non-negative step size such as 0.1"),
    "momentum": (_NOT_NEGATIVE, "Use about 0.9, or 0 for none"),
    "nesterov": (_SHARE, "Use True or False"),
    "beta1": (_SHARE, "Use about 0.9"),
    "beta2": (_SHARE, "Use about 0.999"),
    "weight_decay": (_NOT_NEGATIVE, "Use about 1e-4, or 0 for none"),
    "eps": (_NOT_NEGATIVE, "Use about 1e-8"),
    "nu": (_NOT_NEGATIVE, "Use about 1e-8"),
    "cap": ({"above": 0.0, "finite": False}, "Use inf for no cap"),
    "clip_radius": ({"above": 0.0, "finite": False}, "Use inf for no bound"),
    "relative_floor": (_NOT_NEGATIVE, "Use about 0.1, or 0 for none"),
    "floor": (_POSITIVE, "Use about 1e-8; it bounds the step by lr/√floor"),
    "ema": (_BELOW_ONE, "Use a number such as 0.99, below 1"),
    "trace": (_NOT_NEGATIVE, "Use 1 for the spread of the iterates itself, or 0 for none"),
    "steps": (_NOT_NEGATIVE, "Use the planned number of steps, or 0 where it is not known"),
    "fade": (_SHARE, "Use 0 for a constant step, or 1 for one that shrinks to nothing"),
    "ramp": (_NOT_NEGATIVE, "Use 400, or 0 for a first step of full size however few there are"),
    "scale": (_POSITIVE, "Use the root mean square of the first weights"),
    "curvature_decay": (_BELOW_ONE, "Use about 0.99; 0 remembers nothing"),
    "batch_size": (_POSITIVE, "Use the expected batch size"),
    "hess_init": (_POSITIVE, "Use about 1"),
    "ess": (_POSITIVE, "Use the number of training examples"),
    "temperature": (_NOT_NEGATIVE, "Use 1 for the posterior itself"),
}


def check_hyper(name: str, value: Any) -> float:
    """``value`` inside the range of the hyperparameter ``name``; any finite number where it has none."""
    limits, fix = _RANGES.get(name, ({}, "Use a finite number"))
    number = check_number(name, value, fix, **limits)
    if _MOST < abs(number) < math.inf:
        raise bad(name, value, "is more than fp32 holds", fix)
    if name == "nesterov" and number not in (0.0, 1.0):
        raise bad(name, value, "is neither", fix)
    return number
