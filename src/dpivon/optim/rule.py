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


def debias(beta: Any, t: Any) -> Any:
    """1 − βᵗ; 1 where β = 1, whose average never moves from its start. In double: at β = .99999 a float loses it.

    t is a number, a list of them (one a tensor of a TensorList), or a tensor on the device of β.
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
