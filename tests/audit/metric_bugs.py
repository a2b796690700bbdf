"""Bugs of a metric to clip in, and of views of an example: what D may know, where it is applied, and what is clipped as one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from sowing import GRADIENTS, Patch, attr, both, everywhere
from torch import Tensor

import dpivon.stacked.rules as rules
import dpivon.stacked.stack as stacked
from dpivon.audit.subject import STACK_PATHS, VARIED_PATHS
from dpivon.optim.metric import Factors
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.metric import Scaling
from dpivon.privacy.optimizer import DPOptimizer

_REFUSED = {"distributed": "a metric is for one process, and refused on several"}
_NO_VIEWS = {"distributed": "the audit gives ranks one view per example"}


def metric_of_this_batch() -> dict[str, Patch | str]:
    """D grows with the batch it is about to clip, and is divided out again: nothing but who is in it has changed."""

    def engine(original: Any) -> Any:
        def clip(self: Any) -> None:
            seen = 1.0 + sum(float(t.abs().sum()) for t in self.watch.batch if t.is_floating_point())
            known = self._scaling._factors
            self._scaling._factors = [Factors(f.rows * seen, f.columns) for f in known]
            original(self)

        return clip

    def batch(original: Any) -> Any:
        def make(self: Any, *tensors: Tensor) -> Any:
            made = original(self, *tensors)
            self.seen = 1.0 + made.start.diff()
            return made

        return make

    def metric(original: Any) -> Any:
        return lambda self: tuple([d * c for d, c in zip(rows, self.seen, strict=True)] for rows in original(self))

    return everywhere(
        attr(DPOptimizer, "clip_and_accumulate", engine),
        both(attr(stacked.Stack, "_batch", batch), attr(stacked.Stack, "_metric", metric)),
        **_REFUSED,
    )


def stretched_after_clipping() -> dict[str, Patch | str]:
    """D ⊙ clip(g_i): the norm is that of the gradient as it was."""

    def engine(original: Any) -> Any:
        def sums(self: Any, params: Any, clipping: Any, metric: Any = None) -> Any:
            found = original(self, params, clipping)
            return found if metric is None else [s * f.full(s.shape) for s, f in zip(found, metric, strict=True)]

        return sums

    def stacks(original: Any) -> Any:
        def sums(self: Any, theta: Tensor, batch: Any, bound: Tensor, metric: Any = None) -> Tensor:
            found: Tensor = original(self, theta, batch, bound)
            return found if metric is None else found * torch.stack(list(metric)).double()

        return sums

    return {
        path: attr(GRADIENTS[path], "clipped_sums", stacks if path in STACK_PATHS else engine) for path in VARIED_PATHS
    } | _REFUSED


def told_the_noise_before_it_is_shrunk() -> dict[str, Patch | str]:
    """(σC/b)² for every coordinate, where it is (σC/b)²/D²."""

    def engine(original: Any) -> Any:
        def unscaled(self: Any, release: Any) -> Any:
            made = original(self, release)
            return replace(made, variance={p: torch.full_like(g, release.variance) for p, g in made.gradients.items()})

        return unscaled

    def stacks(original: Any) -> Any:
        def told(state: Any, hyper: Any) -> Tensor:
            found: Tensor = original(state, hyper)
            return found if "metric" not in state else hyper["scaled_variance"].expand_as(found)

        return told

    return everywhere(attr(Scaling, "unscaled", engine), attr(rules, "noise_variance", stacks), **_REFUSED)


def metric_learned_before_the_noise() -> dict[str, Patch | str]:
    """D of the next release is made of the clipped sum itself."""

    def engine(original: Any) -> Any:
        def learn(self: Any, release: Any) -> None:
            original(self, replace(release, gradients={p: p.summed_grad.to(g) for p, g in release.gradients.items()}))

        return learn

    def update(original: Any) -> Any:
        def stash(self: Any, total: Tensor) -> None:
            self.raw = total.float()
            original(self, total)

        return stash

    def rows(original: Any) -> Any:
        def apply(self: Any, g: Tensor, eps: Tensor, t: Tensor, states: Any) -> None:
            original(self, g, eps, t, states)
            for part in self.parts:
                if "metric_second" in part.state:
                    part.state["metric_second"].copy_(self.raw[part.rows].square())

        return apply

    return everywhere(
        attr(Scaling, "learn", engine),
        both(attr(stacked.Stack, "_update", update), attr(stacked.Stack, "_update_rows", rows)),
        **_REFUSED,
    )


def views_clipped_apart() -> dict[str, Patch | str]:
    """Every view is an example of its own: as many times C as there are views."""

    def one(original: Any) -> Any:
        def init(self: Any, *args: Any, **options: Any) -> None:
            original(self, *args, **{**options, "augmentations": 1})

        return init

    apart = attr(BookKeeper, "__init__", one)
    return everywhere(apart, apart, **_NO_VIEWS)


def views_added_up() -> dict[str, Patch | str]:
    """The sum over views, where the mean is meant."""

    def sums(original: Any) -> Any:
        def larger(self: Any, *args: Any) -> Any:
            with mock.patch.object(BookKeeper, "_share", property(lambda self: 1.0 / self.samples)):
                yield from original(self, *args)

        return larger

    added = attr(BookKeeper, "_sums_of_blocks", sums)
    return everywhere(added, added, **_NO_VIEWS)
