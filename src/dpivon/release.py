"""What crosses the release boundary: a privatised value and the variance of the noise that is in it.

Code to the left of the boundary (:mod:`dpivon.privacy`) makes a :class:`Release` after charging for it; code to
the right (:mod:`dpivon.optim` and everything after it) sees nothing else, so all it does is post-processing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True)
class Release:
    """A released gradient g_dp, by parameter, and the variance of the privacy noise in each coordinate of it.

    It is all that an optimizer learns of the data. Made by the mechanism, after charging for it.

    Attributes:
        gradients: g_dp, by parameter.
        variance: the one actually used for this release, (σC/b)² for a mean over the expected batch b, so that bias
            corrections downstream cannot disagree with the mechanism.
        batch_size: the public b that g_dp is a mean over; None if it is a sum or was not stated.
    """

    gradients: Mapping[Tensor, Tensor]
    variance: float
    batch_size: float | None = None


@runtime_checkable
class LearnsFromReleases(Protocol):
    """An optimizer that is handed the :class:`Release` itself: g_dp as it was released, and the variance of its noise.

    An ordinary torch optimizer reads ``p.grad``, into which the boundary copies g_dp before it steps. After
    ``bind_to_releases()`` this one must refuse a ``step()`` without a release: ``p.grad`` may be raw.
    """

    def bind_to_releases(self) -> None: ...

    def step(self, closure: Callable[[], Any] | None = None, *, release: Release | None = None) -> Any: ...


@runtime_checkable
class HasPosterior(Protocol):
    """An optimizer that knows more about the weights than where they are."""

    def posterior(self, model: nn.Module | None = None) -> Any: ...
