"""Bugs between ranks: each does right, and all together do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from clipping_bugs import factors
from noise_bugs import engine_release
from sowing import Patch, attr, both
from torch import Tensor

from dpivon.audit.session import PATHS
from dpivon.optim.ivon import IVON
from dpivon.privacy.ranks.group import Group
from dpivon.privacy.ranks.team import Replicated
from dpivon.privacy.sampling import PoissonSampler
from dpivon.release import Release


def between_ranks(patch: Patch) -> dict[str, Patch | str]:
    """A bug in what ranks do together."""
    return dict.fromkeys(PATHS, "one process: nothing is shared or added up between ranks") | {"distributed": patch}


def team_release(change: Callable[..., Any]) -> Patch:
    """``change(original, self, optimizer, sums, spec)`` in place of what ranks do with their sums."""
    return attr(
        Replicated, "release", lambda original: lambda self, *a: change(lambda *b: original(self, *b), self, *a)
    )


def reduced(change: Callable[[Any, Group, Tensor], Tensor | None]) -> Patch:
    """``change(original, group, flat sums)`` in place of the sum over ranks."""
    return attr(Group, "reduce_to_first", lambda original: lambda self, flat: change(original, self, flat))


def every_rank_adds_noise() -> dict[str, Patch | str]:
    def change(call: Any, self: Any, optimizer: Any, sums: Any, spec: Any) -> Any:
        if not self.group.first:
            sums = {p: s + optimizer.noise.normal(s, spec.noise_std) for p, s in sums.items()}
        return call(optimizer, sums, spec)

    return between_ranks(team_release(change))


def ranks_share_their_noise() -> dict[str, Patch | str]:
    """Each rank adds its W-th of the variance, all from one seed."""

    def change(call: Any, self: Any, optimizer: Any, sums: Any, spec: Any) -> Any:
        generator = torch.Generator().manual_seed(self.releases)
        share = spec.noise_std / self.world**0.5
        sums = {p: s + share * torch.randn(s.shape, generator=generator, dtype=s.dtype) for p, s in sums.items()}
        with engine_release(lambda o, total, spec, noise, charge: o(total, spec, Silent(), charge))():
            return call(optimizer, sums, spec)

    class Silent:
        def normal(self, like: Tensor, std: float) -> Tensor:
            return torch.zeros_like(like)

    return between_ranks(team_release(change))


def ranks_noise_apart() -> dict[str, Patch | str]:
    """Every rank noises the one sum itself: W releases under one charge."""

    def follow(original: Any) -> Any:
        def own(self: Any, optimizer: Any, sums: Any, spec: Any, charge: Any) -> Release:
            made = original(self, optimizer, sums, spec, charge)
            noisy = {p: g + spec.noise_std / spec.divisor * torch.randn_like(g) for p, g in made.gradients.items()}
            return Release(noisy, made.variance, made.batch_size)

        return own

    return between_ranks(attr(Replicated, "_follow", follow))


def averaged_over_ranks() -> dict[str, Patch | str]:
    def change(original: Any, group: Any, flat: Tensor) -> Tensor | None:
        total = original(group, flat)
        return None if total is None else total / group.world

    return between_ranks(reduced(change))


def other_ranks_lost() -> dict[str, Patch | str]:
    def change(original: Any, group: Any, flat: Tensor) -> Tensor | None:
        total = original(group, flat)
        return None if total is None else flat

    return between_ranks(reduced(change))


def reduced_in_bf16() -> dict[str, Patch | str]:
    return between_ranks(reduced(lambda original, group, flat: original(group, flat.bfloat16().to(flat.dtype))))


def clipped_after_reduction(where: str) -> dict[str, Patch | str]:
    """Examples are not clipped; the sum of a rank, or of all of them, is."""
    bound = 0.7

    def change(original: Any, group: Any, flat: Tensor) -> Tensor | None:
        clip = lambda t: t * min(1.0, bound / (float(t.norm()) + 1e-6))  # noqa: E731
        if where == "rank":
            return original(group, clip(flat))
        total = original(group, flat)
        return None if total is None else clip(total)

    return between_ranks(both(reduced(change), factors(lambda o, self, norms: torch.ones_like(norms))))


def theta_of_each_rank() -> dict[str, Patch | str]:
    def begin(original: Any) -> Any:
        def apart(self: Any, module: Any, optimizer: Any) -> None:
            original(self, module, optimizer)
            if isinstance(optimizer.original_optimizer, IVON):
                optimizer.original_optimizer.generator.manual_seed(self.rank)

        return apart

    return between_ranks(attr(Replicated, "begin", begin))


def all_of_the_batch_on_every_rank() -> dict[str, Patch | str]:
    return between_ranks(attr(PoissonSampler, "_of_rank", lambda original: lambda self, drawn: drawn.tolist()))


def empty_part_skipped() -> dict[str, Patch | str]:
    """A rank that got no example of a batch does not take part in its release."""

    def change(call: Any, self: Any, optimizer: Any, sums: Any, spec: Any) -> Any:
        empty = not any(bool(s.any()) for s in sums.values())
        return None if empty and not self.group.first else call(optimizer, sums, spec)

    return between_ranks(team_release(change))


def other_ranks_do_not_charge() -> dict[str, Patch | str]:
    def follow(original: Any) -> Any:
        return lambda self, optimizer, sums, spec, charge: original(self, optimizer, sums, spec, lambda spec: None)

    return between_ranks(attr(Replicated, "_follow", follow))
