"""Who makes a release: one process alone, or several together. What they have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from dpivon.privacy import mechanism
from dpivon.privacy.spec import NoiseSpec
from dpivon.release import Release

if TYPE_CHECKING:
    from dpivon.privacy.optimizer import DPOptimizer

#: What is to become of a sum: a new release, one that was made before a crash, or none; and the evidence of a new one.
Decision = tuple[str, str]
NEW, AGAIN, DROP = "new", "again", "drop"


class Journal(Protocol):
    """Who decides, after a resume, what a release is: a new one, or one that was made before the crash."""

    def decide(self, sums: Mapping[Tensor, Tensor], spec: NoiseSpec) -> Decision:
        """What this sum is to become. One rank decides for all."""
        ...

    def charge_for(self, decision: Decision) -> Callable[[NoiseSpec], None] | None:
        """How to charge what was decided; None to drop it unreleased."""
        ...


class Together(Protocol):
    """How clipped sums become one release."""

    rank: int
    world: int
    sharded: bool  # whether a rank holds a part of every parameter

    def release(self, optimizer: DPOptimizer, sums: Mapping[Tensor, Tensor], spec: NoiseSpec) -> Release | None:
        """Charged, noised once, the same for all; None if it was dropped unreleased."""
        ...

    def stepped(self, optimizer: DPOptimizer) -> None:
        """The optimizer has learned from the release."""
        ...

    def settle(self, module: nn.Module) -> None:
        """The weights that the optimizer holds are about to change: the next forward must see the new ones."""
        ...

    def share(self, generator: torch.Generator) -> None:
        """The first rank's state, in every rank's generator."""
        ...


class Alone:
    """One process."""

    rank, world, sharded = 0, 1, False

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        return self

    def release(self, optimizer: DPOptimizer, sums: Mapping[Tensor, Tensor], spec: NoiseSpec) -> Release | None:
        charge = charge_for(optimizer, decide(optimizer, sums, spec))
        return None if charge is None else mechanism.release(sums, spec, optimizer.noise, charge)

    def stepped(self, optimizer: DPOptimizer) -> None:
        pass

    def settle(self, module: nn.Module) -> None:
        pass

    def share(self, generator: torch.Generator) -> None:
        pass


def decide(optimizer: DPOptimizer, sums: Mapping[Tensor, Tensor], spec: NoiseSpec) -> Decision:
    return (NEW, "") if optimizer.journal is None else optimizer.journal.decide(sums, spec)


def charge_for(optimizer: DPOptimizer, decision: Decision) -> Callable[[NoiseSpec], None] | None:
    """How to charge what was decided; None if it is dropped."""
    return optimizer.charge if optimizer.journal is None else optimizer.journal.charge_for(decision)
