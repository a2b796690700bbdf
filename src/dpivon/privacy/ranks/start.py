"""The beginning of training on several ranks: what they must have in common is compared before anything is drawn."""

from __future__ import annotations

import hashlib
import json
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dpivon.durable.tensors import bytes_of
from dpivon.privacy.optimizer import DPOptimizer
from dpivon.privacy.ranks.group import Group
from dpivon.privacy.ranks.replicated import Replicated
from dpivon.privacy.ranks.sharded import Sharded, check_sharded
from dpivon.privacy.ranks.wrappers import fsdp_modules
from dpivon.privacy.resume import refresh
from dpivon.privacy.sampling import held_tensors


def choose_team(
    group: Group | None, module: nn.Module, optimizer: Optimizer, check_every: int
) -> Replicated | Sharded | None:
    """Sharded if ``fully_shard`` was applied to the model, otherwise replicated; None for a process alone."""
    if fsdp_modules(module):
        check_sharded(module, optimizer, group)
        assert group is not None
        return Sharded(group)
    return None if group is None else Replicated(group, check_every)


class Start:
    """A block in which one rank makes its things. Leaving it, all ranks go on together or none does.

    A rank whose σ, C, q, N, b, data or model differ from the others' would add to a release what the charge does not
    cover, so every rank refuses. ``afresh``: noise and batches then come from new seeds.
    """

    def __init__(self, group: Group | None, *, afresh: bool) -> None:
        self._group, self._afresh = group, afresh
        self._facts: dict[str, Any] = {}
        self._made: tuple[nn.Module, DPOptimizer] | None = None

    def __enter__(self) -> Start:
        return self

    def note(self, module: nn.Module, optimizer: DPOptimizer, dataset: Any, **facts: Any) -> None:
        """What was made, and what must be equal on all ranks."""
        self._made = module, optimizer
        if self._group is None:
            return
        spec = optimizer.spec
        self._facts = {
            "noise_multiplier": spec.noise_multiplier,
            "max_grad_norm": spec.max_grad_norm,
            **{name: str(value) for name, value in facts.items()},
            "expected_batch_size": spec.expected_batch_size,
            "sample_rate": spec.sample_rate,
            "NoiseSpec": spec.digest,
            "optimizer": type(optimizer.original_optimizer).__name__,
            "model": _shapes(module),
            "data": _data(dataset),
        }

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # Ctrl-C does not wait for anybody
        if self._group is not None:
            self._group.all_fine(error, self._facts)
        if self._made is None or error is not None:
            return
        module, optimizer = self._made
        if isinstance(optimizer.together, Replicated | Sharded):
            optimizer.together.begin(module, optimizer)
        if self._afresh:
            refresh(optimizer)


def _shapes(module: nn.Module) -> str:
    shapes = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in module.named_parameters()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


def _data(dataset: Any) -> str:
    """Of a data set in memory: in another order on another rank, one example could be on both, and count for 2C."""
    total = hashlib.sha256(str(len(dataset)).encode())
    for value in held_tensors(dataset):
        total.update(bytes_of(value))
    return total.hexdigest()[:16]
