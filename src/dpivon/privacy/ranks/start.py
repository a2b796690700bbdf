"""The beginning of training on several ranks: what they must have in common is compared before anything is drawn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn
from torch.optim import Optimizer

from dpivon.durable.tensors import bytes_of, held_tensors
from dpivon.errors import bad
from dpivon.privacy.optimizer import DPOptimizer
from dpivon.privacy.ranks.group import Group
from dpivon.privacy.ranks.team import Replicated, Sharded, check_sharded, fsdp_modules
from dpivon.privacy.resume import refresh


def unwrap_parallel(module: nn.Module, wrap_model: bool) -> nn.Module:
    """The network in ``DistributedDataParallel`` or Opacus's counterpart of it, which need not be there.

    Their own work (averaging gradients, handing out the first weights) is not used: gradients are raw, and both are
    done at the boundary. The wrapper's hooks stay silent, since its ``forward`` is never called.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel | DifferentiallyPrivateDistributedDataParallel):
        if not wrap_model:  # then the caller would go on calling the wrapper
            fix = "Pass module.module and call that, or leave wrap_model=True"
            raise bad("wrap_model", False, f"{type(module).__name__} would average raw gradients itself", fix)
        inner: nn.Module = module.module
        return inner
    if isinstance(module, nn.DataParallel):
        fix = "Start one process per device with torchrun, and pass the plain module"
        raise bad("module", type(module).__name__, "runs several devices in one process", fix)
    if type(module).__name__ == "FullyShardedDataParallel":
        fix = "Use torch.distributed.fsdp.fully_shard (FSDP2)"
        raise bad("module", type(module).__name__, "flattens parameters, so that layers cannot be distinguished", fix)
    return module


def choose_team(
    group: Group | None, module: nn.Module, optimizer: Optimizer, check_every: int
) -> Replicated | Sharded | None:
    """Sharded if ``fully_shard`` was applied to the model, otherwise replicated; None for a process alone."""
    if fsdp_modules(module):
        check_sharded(module, optimizer, group)
        assert group is not None
        return Sharded(group)
    return None if group is None else Replicated(group, check_every)


@contextmanager
def starting(group: Group | None, *, afresh: bool) -> Iterator[Start]:
    """A block in which one rank makes its things. Leaving it, all ranks go on together or none does.

    A rank whose σ, C, q, N, b, data or model differ from the others' would add to a release what the charge does not
    cover, so every rank refuses. ``afresh``: noise and batches then come from new seeds.
    """
    start = Start()
    try:
        yield start
    except Exception as error:  # not Ctrl-C, which does not wait for anybody
        if group is not None:
            group.check_agreement(error, {})
        raise
    if group is not None:
        group.check_agreement(None, start.facts)
    if start.made is None:
        return
    module, optimizer = start.made
    if isinstance(optimizer.together, Replicated | Sharded):
        optimizer.together.begin(module, optimizer)
    if afresh:
        refresh(optimizer)


class Start:
    """What one rank has made, and what must be equal on all ranks."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.made: tuple[nn.Module, DPOptimizer] | None = None

    def note(self, module: nn.Module, optimizer: DPOptimizer, dataset: Any, **facts: Any) -> None:
        self.made = module, optimizer
        if not isinstance(optimizer.together, Replicated | Sharded):
            return
        spec = optimizer.spec
        self.facts = {
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


def _shapes(module: nn.Module) -> str:
    shapes = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in module.named_parameters()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


def _data(dataset: Any) -> str:
    """Of a data set in memory: in another order on another rank, one example could be on both, and count for 2C."""
    total = hashlib.sha256(str(len(dataset)).encode())
    for value in held_tensors(dataset):
        total.update(bytes_of(value))
    return total.hexdigest()[:16]
