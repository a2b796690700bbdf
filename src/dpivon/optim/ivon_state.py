"""What IVON knows of one parameter, and the numbers of a parameter group.

The state of a parameter is a plain dictionary, as ``torch.optim`` keeps it: ``step``, ``momentum`` s, ``hess`` h, for bf16 and
fp16 parameters a master ``mean``, and under ``curvature_…`` what the estimator remembers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpivon.errors import DpivonError, check_number
from dpivon.optim.curvature import CurvatureEstimator, memory_of
from dpivon.optim.hyper import check_hyper
from dpivon.optim.ivon_rule import IVONState
from dpivon.optim.precision import follow, full_dtype
from dpivon.optim.tensors import TensorList
from dpivon.shards import is_sharded, local

State = dict[str, Any]

_MEMORY = "curvature_"  # what the estimator remembers, in the state of a parameter


def begun(state: State, p: Tensor, group: dict[str, Any], estimator: CurvatureEstimator) -> State:
    """The state with all that a step needs: begun if it is empty, and where the parameter is now."""
    here = local(p)
    if not state:
        dtype = full_dtype(p)
        state["step"] = 0
        state["momentum"] = torch.zeros_like(here, dtype=dtype, requires_grad=False)
        state["hess"] = torch.full_like(here, group["hess_init"], dtype=dtype, requires_grad=False)
    for name in memory_of(estimator):
        if _MEMORY + name not in state:
            if state["step"]:
                raise DpivonError(
                    f"curvature={estimator.name!r}: the state has no {name!r} of its first {state['step']} steps; "
                    "it was made with another estimator. Go on with that one, or begin anew."
                )
            state[_MEMORY + name] = torch.zeros_like(here, dtype=full_dtype(p), requires_grad=False)
    follow(here, state)
    return state


def all_begun(
    states: Sequence[State], params: Sequence[Tensor], group: dict[str, Any], estimator: CurvatureEstimator
) -> list[State]:
    """:func:`begun` for each; most need nothing, and are passed by."""
    plain = not memory_of(estimator)
    return [
        state if plain and _needs_nothing(state, p) else begun(state, p, group, estimator)
        for state, p in zip(states, params, strict=True)
    ]


def _needs_nothing(state: State, p: Tensor) -> bool:
    """Whether it is ``step``, ``momentum`` and ``hess`` alone, in the parameter's own precision, which is full, and place."""
    momentum, hess = state.get("momentum"), state.get("hess")
    return (
        len(state) == 3
        and momentum is not None
        and hess is not None
        and momentum.dtype is hess.dtype is p.dtype is full_dtype(p)
        and momentum.device == hess.device == p.device
        and not is_sharded(p)
    )


def memory(states: Sequence[State], estimator: CurvatureEstimator) -> dict[str, TensorList]:
    """What the estimator remembers of these parameters."""
    return {name: TensorList([state[_MEMORY + name] for state in states]) for name in memory_of(estimator)}


def keep(
    params: Sequence[Tensor], states: Sequence[State], new: IVONState[TensorList], memory: Mapping[str, TensorList]
) -> None:
    """After a step: m into the parameters, everything else into their states."""
    new.mean.copy_to([local(p) for p in params])
    for state, mean, momentum, hess in zip(states, new.mean, new.momentum, new.hess, strict=True):
        state["momentum"], state["hess"] = momentum, hess
        if "mean" in state:
            state["mean"] = mean
    for name, values in memory.items():
        for state, value in zip(states, values, strict=True):
            state[_MEMORY + name] = value


def check_group(group: dict[str, Any]) -> None:
    """Every number of a parameter group, checked and made plain."""
    for key in ("debias", "rescale_lr"):
        group[key] = bool(group[key])
    group["lr"] = check_number("lr", group["lr"], "Use a non-negative step size such as 0.1", at_least=0.0)
    group["ess"] = check_number("ess", group["ess"], "Use the number of training examples", above=0.0)
    group["hess_init"] = check_number("hess_init", group["hess_init"], "Use about 1", above=0.0)
    group["beta1"] = check_number("beta1", group["beta1"], "Use about 0.9", at_least=0.0, at_most=1.0)
    group["beta2"] = check_number("beta2", group["beta2"], "Use about 0.99999", at_least=0.0, at_most=1.0)
    group["weight_decay"] = check_number("weight_decay", group["weight_decay"], "Use about 1e-4", at_least=0.0)
    group["curvature_decay"] = check_hyper("curvature_decay", group["curvature_decay"])
    group["clip_radius"] = check_number(
        "clip_radius", group["clip_radius"], "Use inf for no bound", above=0.0, finite=False
    )
