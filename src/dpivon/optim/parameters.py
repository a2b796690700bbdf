"""An optimizer's parameters: their state in full precision, and their names.

bf16 and fp16 parameters get an fp32 master copy of their mean: a step of size 1e-3 is lost when it is added to a bf16 weight of
size 1, so the weights that are optimised are the master's and the model's are rounded from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpivon.errors import DpivonError, bad
from dpivon.posterior import unwrap
from dpivon.shards import is_sharded

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def full_dtype(p: Tensor) -> torch.dtype:
    """The dtype in which p is optimised."""
    return torch.float32 if p.dtype in _LOW_PRECISION else p.dtype


def full_dtypes(params: Sequence[Tensor]) -> list[torch.dtype]:
    """:func:`full_dtype` of each."""
    known = {p.dtype: p for p in params}
    full = {dtype: full_dtype(p) for dtype, p in known.items()}
    return [full[p.dtype] for p in params]


def full_mean(p: Tensor, state: dict[str, Any]) -> Tensor:
    """m in full precision; where the caller has written other weights into p since, those are the mean."""
    master = state.get("mean")
    p = p.detach() if torch.is_grad_enabled() else p  # else nothing computed from it records a graph
    if master is None:
        return p
    return torch.where(master.to(p.dtype) == p, master, p.to(master.dtype))


def full_means(params: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> list[Tensor]:
    """:func:`full_mean` of each. Without gradients, and without a master among them, they are their own."""
    if not torch.is_grad_enabled() and not any("mean" in state for state in states):
        return list(params)
    return [full_mean(p, state) for p, state in zip(params, states, strict=True)]


def follow(p: Tensor, state: dict[str, Any]) -> None:
    """Bring state to where p is now, if the model was moved or cast, and keep a master exactly where one is needed."""
    dtype, device = full_dtype(p), p.device
    for key, value in state.items():
        if isinstance(value, Tensor) and (value.dtype is not dtype or value.device != device):
            state[key] = value.to(device=device, dtype=dtype)
    if dtype == p.dtype:
        state.pop("mean", None)
    elif "mean" not in state:
        state["mean"] = p.detach().to(dtype)


def restore(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """After ``load_state_dict``, which casts state to the parameter's dtype: take the tensors from the source again."""
    saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in zip(saved_ids, params, strict=True):
        for key, value in state_dict["state"].get(i, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[p][key] = value.detach().to(device=p.device, copy=True)


def dense(g: Tensor | None) -> Tensor:
    """A gradient that update rules can read."""
    assert g is not None
    if g.is_sparse:
        raise DpivonError("p.grad is sparse: dense gradients are needed; make the embedding layer with sparse=False.")
    return g


def parameter_names(optimizer: Optimizer, model: nn.Module | None) -> dict[Tensor, str]:
    """As in ``model``, or as in ``named_parameters()`` if the optimizer was made from them, otherwise by position."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if model is not None:
        names: dict[Tensor, str] = {p: name for name, p in unwrap(model).named_parameters()}
        missing = [i for i, p in enumerate(params) if p.requires_grad and p not in names]
        if missing:
            raise bad(
                "model",
                type(model).__name__,
                f"does not contain the optimizer's parameter number {missing[0]}",
                "Pass the model whose parameters the optimizer was given",
            )
        return names
    if all("param_names" in group for group in optimizer.param_groups):
        return {
            p: name
            for group in optimizer.param_groups
            for p, name in zip(group["params"], group["param_names"], strict=True)
        }
    trained = [p for p in params if p.requires_grad]
    return {p: str(i) for i, p in enumerate(trained)}


def ready(state: dict[str, Any], p: Tensor) -> bool:
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
