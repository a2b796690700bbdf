"""The drawn examples of all runs of a stack."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """The runs' examples one after the other; rows after the last are spare. ``places`` points past the end where a
    run has fewer.
    """

    inputs: Tensor  # [capacity, …], as the gradients want them
    labels: Tensor  # [capacity]
    model: Tensor  # [capacity], whose example it is
    start: Tensor  # [K + 1], where each run's examples begin
    places: Tensor  # [K, most], each run's rows
    seats: Tensor  # [capacity], the inverse: where in places.flatten() each row is; any for spare rows
    views: Tensor | None = None  # [capacity, views, 3], how each view of it is made; None for the example itself
