"""The ledger and the checkpoints of a run on several ranks: the first rank has the files, the others follow.

A checkpoint is what one process would write: one file, with its checksum and nothing in it that is executed, for any number
of ranks. So the first rank holds all of model and optimizer state in the memory of its host while it writes or reads.
Tensors travel one at a time: a device never holds more than one whole tensor besides its own part.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpivon.durable.ledger import Ledger, Record, Terms
from dpivon.durable.tensors import flatten, unflatten
from dpivon.privacy.ranks.group import Group
from dpivon.shards import is_sharded, like_parameter, local, part_of, whole

if TYPE_CHECKING:
    from dpivon.privacy.optimizer import DPOptimizer


class FollowedLedger:
    """The record of a ledger that another rank writes. A charge here follows one that is on that rank's disk already."""

    def __init__(self, path: str | os.PathLike[str], record: Record) -> None:
        self.path, self.record = Path(path), record

    def charge(self, terms: Terms, n: int = 1, evidence: str = "") -> None:
        self.record.note(terms, n, evidence)

    def close(self) -> None:
        """Nothing is open here."""


def open_ledger(path: str | os.PathLike[str], group: Group | None) -> Ledger | FollowedLedger:
    """The ledger, where this process keeps it; an error on one rank is one on all."""
    if group is None:
        return Ledger(path)
    ledger = group.on_first(lambda: Ledger(path))
    own = Record("") if ledger is None else ledger.record
    rows = [[list(map(dict, terms)), n] for terms, n in own.rows]
    name, rows, evidence, releases = group.broadcast_value([own.id, rows, list(own.evidence.items()), own.releases])
    if ledger is not None:
        return ledger
    return FollowedLedger(path, Record(name, [(tuple(t), n) for t, n in rows], dict(evidence), releases=releases))


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
    text, listed = group.broadcast_value([text, [[name, list(t.shape), str(t.dtype)] for name, t in tensors.items()]])
    if text is None:
        return None
    kept: dict[str, Tensor] = {}
    for name, shape, dtype in listed:
        like = tensors[name] if group.first else torch.empty(shape, dtype=getattr(torch, dtype.split(".")[1]))
        got = group.broadcast(like)
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
