"""Data parallel: every rank has the whole model and a part of the batch.

Noise is drawn by the first rank only. The alternatives are worse where something goes wrong: with one seed for all, a rank
that falls out of step noises the same sum a second time, which is a second release under one charge; with a share of the
noise from each, a missing or repeated share is too little noise. Here a rank that is not the first has nothing to
release but what it was sent, so all of them learn from the same numbers to the bit. It costs no more: a reduction and a
broadcast are the two halves of an all-reduce.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpivon.durable.tensors import bytes_of
from dpivon.errors import DpivonError
from dpivon.optim.precision import full_dtype
from dpivon.privacy import mechanism
from dpivon.privacy.mechanism import NoiseSpec
from dpivon.privacy.ranks.group import Group
from dpivon.privacy.ranks.team import Team
from dpivon.release import Release

if TYPE_CHECKING:
    from dpivon.privacy.optimizer import DPOptimizer


class Replicated(Team):
    """Sums go to the first rank, the release comes back.

    ``check_every`` releases the ranks compare a digest of parameters and optimizer state; 0 never.
    """

    def __init__(self, group: Group, check_every: int) -> None:
        super().__init__(group)
        self.check_every = check_every

    @torch.no_grad()
    def begin(self, module: nn.Module, optimizer: DPOptimizer) -> None:
        """Every rank starts from the first one's weights, batches and θ-samples."""
        for t in [*module.parameters(), *module.buffers()]:
            t.copy_(self.group.from_first(t))
        self.share(optimizer.sampler_generator)
        inner: Any = optimizer.original_optimizer
        if hasattr(inner, "generator"):
            if inner.generator is None:  # the global one is each rank's own
                inner.generator = torch.Generator(optimizer.params[0].device)
                inner.generator.manual_seed(int(torch.randint(2**63 - 1, (1,))))
            self.share(inner.generator)
        self.check_replicas(optimizer)

    def stepped(self, optimizer: DPOptimizer) -> None:
        if self.check_every and self.releases % self.check_every == 0:
            self.check_replicas(optimizer)
        super().stepped(optimizer)

    def check_replicas(self, optimizer: DPOptimizer) -> None:
        """All ranks have the same posterior to the bit, or an error."""
        said = [n for (n,) in self.group.numbers([state_digest(optimizer)])]
        for rank, digest in enumerate(said):
            if digest != said[0]:
                raise DpivonError(
                    f"After {self.releases} releases rank {rank} has other weights or another optimizer state than rank 0, "
                    "though both learned from the same releases. Write to the model on every rank alike, and run them on "
                    "machines and libraries of one kind; go on from the last checkpoint."
                )

    def _add_up(self, sums: Mapping[Tensor, Tensor]) -> Mapping[Tensor, Tensor] | None:
        total = self.group.sum_to_first(torch.cat([t.flatten() for t in sums.values()]))
        return None if total is None else _split(total, sums)

    def _make(
        self,
        optimizer: DPOptimizer,
        total: Mapping[Tensor, Tensor],
        spec: NoiseSpec,
        charge: Callable[[NoiseSpec], None],
    ) -> Release:
        return mechanism.release(total, spec, optimizer.noise, charge)

    def _hand_out(self, made: Release) -> Release:
        self.group.from_first(torch.cat([g.flatten() for g in made.gradients.values()]))
        return made

    def _follow(
        self,
        optimizer: DPOptimizer,
        sums: Mapping[Tensor, Tensor],
        spec: NoiseSpec,
        charge: Callable[[NoiseSpec], None],
    ) -> Release:
        charge(spec)
        room = torch.cat([t.new_empty(t.numel(), dtype=full_dtype(p)) for p, t in sums.items()])
        sent = _split(self.group.from_first(room), sums)
        return mechanism.as_release({p: g.to(full_dtype(p)) for p, g in sent.items()}, spec)


def _split(flat: Tensor, like: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    parts = flat.split([t.numel() for t in like.values()])
    return {p: part.view(t.shape) for (p, t), part in zip(like.items(), parts, strict=True)}


def state_digest(optimizer: DPOptimizer) -> int:
    """Of all that the optimizer has learned."""
    total = hashlib.sha256()
    inner = optimizer.original_optimizer
    for group in inner.param_groups:
        for p in group["params"]:
            for value in (p, *(inner.state[p].values() if p in inner.state else ())):
                total.update(bytes_of(value) if isinstance(value, Tensor) else repr(value).encode())
    return int.from_bytes(total.digest()[:7], "little")
