"""What the release boundary asks of an optimizer that learns from releases.

An ordinary torch optimizer reads ``p.grad``, into which the boundary copies g_dp before it steps. One that follows this
protocol is handed the :class:`~dpivon.release.Release` itself: the gradient in the precision it was released in, and the
true variance of its noise, which bias corrections and Langevin temperatures need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import nn

from dpivon.release import Release


@runtime_checkable
class LearnsFromReleases(Protocol):
    """After ``bind_to_releases()`` the optimizer must refuse a ``step()`` without a release: ``p.grad`` may be raw."""

    def bind_to_releases(self) -> None: ...

    def step(self, closure: Callable[[], Any] | None = None, *, release: Release | None = None) -> Any: ...


@runtime_checkable
class HasPosterior(Protocol):
    """An optimizer that knows more about the weights than where they are."""

    def posterior(self, model: nn.Module | None = None) -> Any: ...
