"""Examples of several rows: augmentations of one, or the rows of a person. Their gradients are added up, then measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from dpivon.errors import PrivacyError
from dpivon.privacy.layers.made import Mapped
from dpivon.privacy.layers.uses import Dense, Outer, Rows, Use, merge, settled, unfolded


@dataclass(frozen=True)
class Groups:
    """Which consecutive rows of a batch are one example: ``most`` of each, or ``sizes``, of which ``most`` is the largest.

    Examples with equally many rows are added up together, apart from the others. So what an example's gradient is, to the
    last bit, does not depend on how many rows another one has.
    """

    most: int
    sizes: tuple[int, ...] = ()
    divisors: tuple[int, ...] = ()  # rows of each person, where it is their mean that counts

    @classmethod
    def of_people(cls, sizes: tuple[int, ...] | None, rows: int, augmentations: int, *, mean: bool) -> Groups:
        """Of a batch of so many rows in which people have ``sizes`` rows each, one person's after another's."""
        if sizes is None:
            raise PrivacyError(
                "user_ids: nothing says whose the rows of this batch are, so no person could be clipped. Take every batch "
                "from the data loader that make_private returned, or from dpivon.BatchMemoryManager, and release it once."
            )
        sizes = sizes or (1,)  # an empty batch is run as one made-up row
        if sum(sizes) * augmentations != rows:
            raise PrivacyError(
                f"user_ids: the model was given {rows} rows, and the batch has {sum(sizes) * augmentations} of {len(sizes)} "
                "people, so no person could be clipped. Pass all rows of a batch at once, in the order of the loader."
            )
        rows_of = tuple(size * augmentations for size in sizes)
        return cls(max(rows_of), rows_of, sizes if mean else ())

    def shares(self, share: float, like: Tensor) -> float | Tensor:
        """What a row counts for, by example in the last dimension: ``share``, over the rows of a person whose mean counts."""
        if not self.divisors:
            return share
        return share / torch.tensor(self.divisors, dtype=torch.float64, device=like.device)

    def added_up(self, use: Use) -> Use:
        """The use whose gradient of an example is the sum over its rows."""
        if min(self.sizes, default=self.most) == self.most:
            return settled(use.grouped(self.most))
        use = unfolded(use)
        parts, places = [], []
        for size, own, rows in self._parts:
            some = _some(use, rows)
            parts.append(settled(some.grouped(size)) if size > 1 else some)
            places.append(own)
        ragged = Ragged(tuple(parts), tuple(places))
        return Dense(ragged.materialise()) if all(isinstance(part, Dense) for part in parts) else ragged

    def padded(self, places: int) -> tuple[Tensor, Tensor]:
        """The row of the batch at each of so many places of every example, and what it counts for.

        Rows beyond an example's own repeat them, so that a model computes what it would anyway, and count for nothing.
        """
        sizes, place = torch.tensor(self.sizes).unsqueeze(1), torch.arange(places)
        counts = (place < sizes).float()
        if self.divisors:
            counts /= torch.tensor(self.divisors).unsqueeze(1)
        return (sizes.cumsum(0) - sizes + place % sizes).flatten(), counts.flatten()

    @cached_property
    def _parts(self) -> list[tuple[int, Tensor, Tensor]]:
        """Every number of rows that occurs, the examples that have so many, and their rows."""
        sizes = torch.tensor(self.sizes)
        owner = torch.arange(len(sizes)).repeat_interleave(sizes)
        return [
            (size, (sizes == size).nonzero().flatten(), (sizes[owner] == size).nonzero().flatten())
            for size in sizes.unique().tolist()
        ]


def _some(use: Use, rows: Tensor) -> Use:
    """The same use of some rows."""
    if isinstance(use, Mapped):
        return replace(use, outer=cast(Outer, _some(use.outer, rows)))
    if not isinstance(use, Dense | Outer | Rows):
        made = use.materialise()
        return Dense(made[rows.to(made.device)])
    tensors = {name: t for name in ("a", "g", "index") if (t := getattr(use, name, None)) is not None}
    return replace(use, **{name: t[rows.to(t.device)] for name, t in tensors.items()})


@dataclass(frozen=True)
class Ragged:
    """Several uses of one parameter, each of the examples at its ``places``."""

    parts: tuple[Use, ...]
    places: tuple[Tensor, ...]

    def squared_norm(self) -> Tensor:
        return self._placed([part.squared_norm().double() for part in self.parts])

    def weighted_sum(self, c: Tensor) -> Tensor:
        sums = [part.weighted_sum(c[at.to(c.device)]) for part, at in zip(self.parts, self.places, strict=True)]
        return torch.stack([total.double().flatten() for total in sums]).sum(0)

    def materialise(self) -> Tensor:
        return self._placed([part.materialise() for part in self.parts])

    def without(self, dropped: Tensor) -> Ragged:
        pairs = zip(self.parts, self.places, strict=True)
        return replace(self, parts=tuple(part.without(dropped[at.to(dropped.device)]) for part, at in pairs))

    def grouped(self, rows: int) -> Use:
        return Dense(self.materialise()).grouped(rows)

    def joined(self, others: Sequence[Ragged]) -> Ragged:
        """With others of the same examples; their gradients add up."""
        parts = zip(self.parts, *(use.parts for use in others), strict=True)
        return replace(self, parts=tuple(merge(part) for part in parts))

    def _placed(self, values: Sequence[Tensor]) -> Tensor:
        every = values[0].new_empty(sum(map(len, values)), *values[0].shape[1:])
        for at, value in zip(self.places, values, strict=True):
            every[at.to(every.device)] = value.to(every)
        return every
