"""The clipped sum of a logical batch, where Opacus keeps it, in ``p.summed_grad``; and the release that takes its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor
from torch.optim import Optimizer

from dpivon.optim.tensors import TensorList
from dpivon.release import Release
from dpivon.shards import like_parameter, local


def drop(inner: Optimizer) -> None:
    """Nothing is summed, also of a parameter that was frozen since: thawed, it would bring its part into another release."""
    for p in _all(inner):
        p.summed_grad = None


def add(params: Sequence[Any], sums: Sequence[Tensor]) -> None:
    """All or nothing: after an error half-way, a retry would count the batch twice in some of the parameters."""
    held = [p.summed_grad for p in params]
    _check_unreleased(held)
    if any(h is None for h in held):
        new = [s if h is None else h + s for h, s in zip(held, sums, strict=True)]
    else:
        new = (TensorList(held) + TensorList(sums)).tensors
    for p, total in zip(params, new, strict=True):
        p.summed_grad = total


def unreleased(params: Sequence[Any]) -> dict[Tensor, Tensor]:
    """The sum by parameter; an error if it was released before."""
    _check_unreleased([p.summed_grad for p in params])
    return {p: p.summed_grad for p in params}


def _check_unreleased(held: Sequence[Tensor | None]) -> None:
    for total in held:
        if total is not None:
            _check_processed_flag(total)


def hand_over(release: Release, params: Sequence[Any], inner: Optimizer) -> None:
    """The sum is spent, and ``p.grad`` is g_dp: raw gradients and sums are gone, also of a parameter that was frozen since."""
    for p in _all(inner):
        p.grad = None
        if p not in release.gradients:
            p.summed_grad = None
    released = TensorList([_shaped(release.gradients[p], local(p)) for p in params])
    for p, g in zip(params, released.copied([p.dtype for p in params]), strict=True):
        _mark_as_processed(p.summed_grad)
        p.grad = like_parameter(g, p)


def _all(inner: Optimizer) -> Iterator[Any]:
    return (p for group in inner.param_groups for p in group["params"])


def _shaped(g: Tensor, p: Tensor) -> Tensor:
    return g if g.shape == p.shape else g.view_as(p)
