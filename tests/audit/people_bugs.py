"""Bugs of privacy per person: who is drawn, what is clipped as one, and what N counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from program_bugs import parts as cut_parts
from program_bugs import rows_as_examples
from sowing import Patch, attr, everywhere

import dpivon.privacy.engine as engines
from dpivon.privacy import logical_batch
from dpivon.privacy.layers.groups import Groups
from dpivon.privacy.mechanism import NoiseSpec
from dpivon.privacy.sampling import PoissonSampler

_ROWS = "a stack draws rows, and takes no ids"
_ELSEWHERE = {"distributed": "people on ranks are held to one process by tests/distributed instead"}


def _of_people(patch: Patch, **special: Patch) -> dict[str, Patch | str]:
    return everywhere(patch, _ROWS, **_ELSEWHERE, **special)


def rows_clipped_apart() -> dict[str, Patch | str]:
    """Every row is clipped by itself: as many times C as a person has rows."""

    def apart(original: Any) -> Any:
        return classmethod(lambda cls, sizes, rows, augmentations, *, mean: cls(augmentations))

    return _of_people(attr(Groups, "of_people", apart), compiled=rows_as_examples())


def rows_added_up() -> dict[str, Patch | str]:
    """The sum over a person's rows, where the mean is stated."""
    program = attr(Groups, "padded", lambda original: lambda self, places: original(replace(self, divisors=()), places))
    return _of_people(attr(Groups, "shares", lambda original: lambda self, share, like: share), compiled=program)


def rows_drawn() -> dict[str, Patch | str]:
    """Rows are drawn with probability q, so that a person with many is there more often than charged."""

    def drawn(original: Any) -> Any:
        def batches(self: Any) -> Iterator[list[int]]:
            if self.people is None:
                yield from original(self)
                return
            self.sizes.clear()
            for _ in range(self.steps):
                rows = (torch.rand(len(self.people.of_row), generator=self.generator) < self.sample_rate).nonzero()
                owners = self.people.of_row[rows.flatten()].tolist()
                self.sizes.append(tuple(owners.count(one) for one in dict.fromkeys(owners)))
                self.draws.draw()
                yield rows.flatten().tolist()

        return batches

    return _of_people(attr(PoissonSampler, "__iter__", drawn))


def n_counts_rows() -> dict[str, Patch | str]:
    """q is charged as b over the number of rows, and people are drawn at b over their own number."""

    def charged(original: Any) -> Any:
        return lambda **terms: NoiseSpec(**{**terms, "sample_rate": terms["sample_rate"] / (2 if terms["unit"] else 1)})

    return _of_people(attr(engines, "NoiseSpec", charged))


def people_cut_in_two() -> dict[str, Patch | str]:
    """A micro-batch ends within a person, each part of whom is clipped."""

    def cut(original: Any) -> Any:
        def parts(self: Any) -> Iterator[list[int]]:
            if self.sampler.people is None:
                yield from original(self)
                return
            for rows in self.sampler:
                owners = [i for i, n in enumerate(self.sampler.sizes.popleft()) for _ in range(n)]
                within = next(i for i in range(1, len(owners)) if owners[i] == owners[i - 1])
                for part in (slice(0, within), slice(within, None)):
                    sizes = tuple(owners[part].count(one) for one in dict.fromkeys(owners[part]))
                    self.flags.append((part.start == 0, part.stop is None, sizes))
                    yield rows[part]

        return parts

    def program(self: Any, parts: Any) -> Iterator[tuple[bool, bool, Any]]:
        draws = self.optimizer.draws
        for first, last, part in parts:
            sizes, at = draws.sizes, next((i for i, n in enumerate(draws.sizes) if n > 1), None)
            if at is None:
                yield first, last, part
                continue
            rows = sum(sizes[:at]) + 1
            draws.sizes = (*sizes[:at], 1)
            yield first, False, [t[:rows] for t in part]
            draws.sizes = (sizes[at] - 1, *sizes[at + 1 :])
            yield False, last, [t[rows:] for t in part]

    return _of_people(attr(logical_batch._Split, "__iter__", cut), compiled=cut_parts(program))
