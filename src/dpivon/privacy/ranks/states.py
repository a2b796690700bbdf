"""The state of a run on several ranks as one process would have it: written by the first rank, cut up again when read.

Checkpoints stay one file in one format, with its checksum, its single rename and nothing in it that is executed, and fit any
number of ranks. (torch.distributed.checkpoint would write in parallel, but a pickle and several files.) The price: the first
rank holds all of model and optimizer state in the memory of its host while it writes or reads. Tensors travel one at a time,
so a device never holds more than one whole tensor besides its own part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dpivon.durable.tensors import flatten, unflatten
from dpivon.privacy.optimizer import DPOptimizer
from dpivon.privacy.ranks.group import Group
from dpivon.shards import is_sharded, like_parameter, local, part_of, whole


def whole_model(optimizer: DPOptimizer, keep: bool) -> dict[str, Tensor]:
    """The model's state with every sharded tensor gathered; on ranks that do not ``keep`` it, without those tensors."""
    return _kept({name: (t, t) for name, t in optimizer.module.state_dict().items()}, keep)


def whole_optimizer(optimizer: DPOptimizer, keep: bool) -> dict[str, Any]:
    """The optimizer's state, likewise."""
    state: dict[str, Any] = optimizer.state_dict()
    params = _params(optimizer)
    gathered = {}
    for i, values in state["state"].items():
        tensors = {key: (t, params[i]) for key, t in values.items() if _belongs(t, params[i])}
        gathered[i] = {key: t for key, t in values.items() if key not in tensors} | _kept(tensors, keep)
    return {**state, "state": gathered}


def _kept(tensors: Mapping[str, tuple[Tensor, Tensor]], keep: bool) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, (t, owner) in tensors.items():
        if not is_sharded(owner):
            out[name] = t
            continue
        full = whole(local(t).detach(), owner)  # all ranks together, also those that throw it away
        if keep:
            out[name] = full.cpu()
    return out


def _belongs(t: Any, p: Tensor) -> bool:
    """Whether a tensor of the state is laid out as its parameter."""
    return isinstance(t, Tensor) and t.dim() > 0 and is_sharded(p) and local(t).shape == local(p).shape


def load_model(optimizer: DPOptimizer, saved: Mapping[str, Tensor]) -> None:
    """Whole tensors, or parts where the model is sharded, into the model."""
    own = optimizer.module.state_dict()
    if not any(is_sharded(t) for t in own.values()):
        optimizer.module.load_state_dict(saved)
        return
    with torch.no_grad():
        for name, t in own.items():
            local(t).copy_(saved[name])


def share_state(group: Group, optimizer: DPOptimizer, state: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the first rank read, on every rank; of sharded tensors each gets its part."""
    tensors: dict[str, Tensor] = {}
    text = flatten(state, "state", tensors) if group.first and state is not None else None
    facts = group.tell([text, [[name, list(t.shape), str(t.dtype)] for name, t in tensors.items()]])
    text, listed = facts
    if text is None:
        return None
    kept: dict[str, Tensor] = {}
    for name, shape, dtype in listed:
        like = tensors[name] if group.first else torch.empty(shape, dtype=getattr(torch, dtype.split(".")[1]))
        got = group.from_first(like)
        owner = _owner(optimizer, name, shape)
        kept[name] = got if owner is None else part_of(got, owner).clone()
    received: dict[str, Any] = unflatten(text, kept)
    return _laid_out(optimizer, received)


def _owner(optimizer: DPOptimizer, name: str, shape: list[int]) -> Tensor | None:
    """The sharded tensor of this run that a tensor of a flattened checkpoint is the whole of; None if it is another."""
    place, found = name.split("."), None
    if place[:2] == ["state", "model"]:
        found = optimizer.module.state_dict().get(".".join(place[2:]))
    elif place[:3] == ["state", "optimizer", "state"]:
        found = _params(optimizer)[int(place[3])]
    return found if found is not None and is_sharded(found) and shape and list(found.shape) == shape else None


def _laid_out(optimizer: DPOptimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Torch's own optimizers keep state as sharded as their parameters; ours keep the parts."""
    if not optimizer.together.sharded or hasattr(optimizer.original_optimizer, "bind_to_releases"):
        return state
    for i, p in enumerate(_params(optimizer)):
        for key, value in state["optimizer"]["state"].get(i, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state["optimizer"]["state"][i][key] = like_parameter(value.to(p.device), p)
    return state


def _params(optimizer: DPOptimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
