"""What the release boundary asks of an optimizer that learns from releases.

An ordinary torch optimizer reads ``p.grad``, into which the boundary copies g_dp before it steps. One that follows this
protocol is handed the :class:`~dpivon.release.Release` itself: the gradient in the precision it was released in, and the
true variance of its noise, which bias corrections and Langevin temperatures need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from dpivon.errors import bad
from dpivon.optim.tensors import TensorList
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


def noise_variance(
    release: Release | None, params: Sequence[Tensor], dtypes: Sequence[torch.dtype], learner: Any
) -> float | TensorList:
    """Of the noise in these parameters' gradients: 0 without a release, one number, or under a metric one a coordinate."""
    if release is None:
        return 0.0
    if not isinstance(release.variance, Mapping):
        return release.variance
    check_per_coordinate(learner)
    return TensorList([release.variance[p].to(dtype) for p, dtype in zip(params, dtypes, strict=True)])


def one_variance(release: Release) -> float:
    """For those who need the same for all coordinates."""
    if isinstance(release.variance, Mapping):
        fix = "Train without metric"
        raise bad("release.variance", "one a coordinate", "is one number where no metric was used", fix)
    return release.variance


def check_per_coordinate(learner: Any) -> None:
    """Refuse whoever learns from a release and knows one noise variance only, where every coordinate has its own."""
    if isinstance(learner, LearnsFromReleases) and not getattr(learner, "per_coordinate", False):
        what = getattr(getattr(learner, "rule", None), "name", type(learner).__name__)
        raise bad(
            "metric",
            what,
            "knows one noise variance for all coordinates, and under a metric each has its own",
            "Train without metric, or set per_coordinate = True on a rule that takes them",
        )
