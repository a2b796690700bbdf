"""What every group of ranks does at a release: agree, let the first rank charge, and only then have something to release.

The order is the guarantee's:

1. All ranks compare the digest of their ``NoiseSpec`` and where they are in the stream of batches. If anything differs,
   all of them stop: nothing was released.
2. Clipped sums are added up, in double, without noise.
3. The first rank decides what the sum is (after a resume it may be one that was made before), charges it on disk, and
   tells the others. They cannot go on without its word, so no rank has a release that is not charged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpivon.errors import PrivacyError
from dpivon.privacy.mechanism import DROP, Decision, NoiseSpec, charge_for, decide
from dpivon.privacy.ranks.group import Group, failure
from dpivon.release import Release

if TYPE_CHECKING:
    from dpivon.privacy.optimizer import DPOptimizer


class Team:
    """Several processes that make one release. A subclass says where sums, noise and releases are."""

    sharded = False

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.world = group, group.rank, group.world
        self.asked_to_stop = 0  # a signal that this rank got
        self.on_stop: Callable[[int], None] | None = None  # what all ranks do when any of them got one
        self._stop = 0
        self.releases = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Team:
        return self

    def share(self, generator: torch.Generator | None) -> None:
        """The first rank's whole state: a seed would be 32 secret bits."""
        if generator is not None:
            generator.set_state(self.group.from_first(generator.get_state()))

    def release(self, optimizer: DPOptimizer, sums: Mapping[Tensor, Tensor], spec: NoiseSpec) -> Release | None:
        self._agree(optimizer, spec)
        total = self._add_up(sums)
        if total is not None and self.group.first:
            made = self._lead(optimizer, total, spec)
        else:
            decision: Decision = tuple(self.group.heed(self.group.tell()))
            charge = charge_for(optimizer, decision)
            made = None if charge is None else self._follow(optimizer, sums, spec, charge)
        self.releases += made is not None
        return made

    def _lead(self, optimizer: DPOptimizer, total: Mapping[Tensor, Tensor], spec: NoiseSpec) -> Release | None:
        made: Release | None = None
        try:
            decision = decide(optimizer, total, spec)
            if decision[0] != DROP:
                charge = charge_for(optimizer, decision)
                assert charge is not None
                made = self._make(optimizer, total, spec, charge)
        except BaseException as error:
            self.group.tell(failure(error))
            raise
        self.group.tell(decision)
        if made is None:
            charge_for(optimizer, decision)  # after the word: new seeds are agreed on by all
            return None
        return self._hand_out(made)

    def _agree(self, optimizer: DPOptimizer, spec: NoiseSpec) -> None:
        """One spec and one draw for all ranks, or no release."""
        said = self.group.numbers(
            [int(spec.digest[:15], 16), optimizer.batch_number, self.releases, self.asked_to_stop]
        )
        self._stop = max(numbers[3] for numbers in said)
        names = ("noise_multiplier or max_grad_norm", "batch number", "number of releases")
        for rank, numbers in enumerate(said):
            for name, ours, theirs in zip(names, said[0], numbers, strict=False):
                if ours != theirs:
                    raise PrivacyError(
                        f"The {name} of rank {rank} is not that of rank 0, so nothing was released: their sums do not belong "
                        "to one release. Let every rank take the same steps, and change σ and C on all of them between two."
                    )

    def stepped(self, optimizer: DPOptimizer) -> None:
        if self._stop and self.on_stop is not None:
            self.on_stop(self._stop)

    def settle(self, module: nn.Module) -> None:
        pass

    # ---- where things are

    def _add_up(self, sums: Mapping[Tensor, Tensor]) -> Mapping[Tensor, Tensor] | None:
        """The sums over all ranks, where the first rank will have them; None elsewhere."""
        raise NotImplementedError

    def _make(
        self,
        optimizer: DPOptimizer,
        total: Mapping[Tensor, Tensor],
        spec: NoiseSpec,
        charge: Callable[[NoiseSpec], None],
    ) -> Release:
        """The first rank's part of the release, charged."""
        raise NotImplementedError

    def _hand_out(self, made: Release) -> Release:
        """What the first rank sends to the others."""
        raise NotImplementedError

    def _follow(
        self,
        optimizer: DPOptimizer,
        sums: Mapping[Tensor, Tensor],
        spec: NoiseSpec,
        charge: Callable[[NoiseSpec], None],
    ) -> Release:
        """Another rank's part of the release, after the first one's charge."""
        raise NotImplementedError
