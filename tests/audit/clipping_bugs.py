"""Bugs of clipping and summing: an example that moves the sum by more than C, or one that is in it twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from sowing import GRADIENTS, Patch, attr, both, everywhere, unrehearsed
from torch import Tensor

import dpivon.privacy.clipping as clipping
import dpivon.privacy.gradients.bookkeeping as bookkeeping
import dpivon.privacy.gradients.side_by_side as side_by_side
from dpivon.audit.session import PATHS
from dpivon.privacy.clipping import FlatClipping
from dpivon.privacy.kernels.padded_step import PaddedStep
from dpivon.privacy.layers import fallback, uses
from dpivon.privacy.layers.uses import Dense, Outer, Rows
from dpivon.privacy.logical_batch import LogicalBatch
from dpivon.privacy.optimizer import DPOptimizer


def factors(change: Callable[[Any, Any, Tensor], Tensor], *, joint: bool = True) -> Patch:
    """``change(original, self, norms)`` in place of the clip factors."""
    own = attr(FlatClipping, "factors", lambda original: lambda self, norms: change(original, self, norms))
    return own if joint else both(own, lambda: mock.patch.object(FlatClipping, "joint", False))


def norms_without(drop: Callable[[int], list[int]]) -> dict[str, Patch | str]:
    """Norms that leave out some of the parameters: ``drop`` of how many gives which."""

    def change(original: Any, self: Any, norms: Tensor) -> Tensor:
        norms = norms.clone()
        if len(norms) > 1:
            norms[drop(len(norms))] = 0.0
        return original(self, norms)

    return everywhere(factors(change, joint=False), factors(change, joint=False))


def clipped_apart(groups: Callable[[int], list[slice]]) -> dict[str, Patch | str]:
    """Every group of parameters is clipped to C by itself."""

    def change(original: Any, self: Any, norms: Tensor) -> Tensor:
        return torch.cat([original(self, norms[g]) for g in groups(len(norms))])

    return everywhere(factors(change, joint=False), factors(change, joint=False))


def no_clipping() -> dict[str, Patch | str]:
    patch = factors(lambda original, self, norms: torch.ones_like(norms))
    return everywhere(patch, patch)


def not_finite() -> dict[str, Patch | str]:
    """The factor of an example that is not finite is what arithmetic makes of it."""
    keep = attr(clipping, "_factor", lambda o: lambda norm, bound: (bound / (norm + 1e-6)).clamp(max=1.0))
    return everywhere(keep, keep)


def sums(change: Callable[[Any, tuple[Any, ...]], Any], recorded: str = "_sums") -> dict[str, Patch | str]:
    """``change(original bound to its object, arguments)`` in place of a path's clipped sums; in a compiled step where they are
    ``recorded``, or ``at`` every replay."""

    def program(original: Any) -> Any:
        def changed(self: Any, *given: Any) -> Any:
            losses: list[Any] = []

            def call() -> list[Tensor]:
                row, loss = original(self, *given)
                losses.append(loss)
                return [row]

            (row,) = change(call, (None, self.clipping))
            return row, losses[0]

        return changed

    return {"compiled": attr(PaddedStep, recorded, program)} | {
        path: attr(
            kind, "clipped_sums", lambda original: lambda self, *a: change(lambda *b: original(self, *(b or a)), a)
        )
        for path, kind in GRADIENTS.items()
    }


def rounded(total: Any) -> Any:
    if isinstance(total, list):
        return [t.bfloat16().to(t.dtype) for t in total]
    return total.bfloat16().to(total.dtype)


def clip_the_batch() -> dict[str, Patch | str]:
    """The gradient of the batch is clipped to C, not that of each example."""

    def change(call: Any, args: tuple[Any, ...]) -> Any:
        with attr(FlatClipping, "factors", lambda o: lambda self, norms: (norms.sum(0) * 0 + 1).expand_as(norms))():
            total = call()
        if isinstance(total, list):
            norm = torch.stack([t.double().square().sum() for t in total]).sum().sqrt()
            return [t * (args[1].sensitivity / (norm + 1e-6)).clamp(max=1.0) for t in total]
        norm = total.norm(dim=1, keepdim=True)
        return total * (args[2].double().unsqueeze(1) / (norm + 1e-6)).clamp(max=1.0)

    return sums(change)


def clip_the_share_of_the_mean() -> dict[str, Patch | str]:
    """C is applied to g_i/b, an example's share of the mean, and b is multiplied back."""
    b = 12.0

    def change(original: Any, self: Any, norms: Tensor) -> Tensor:
        return original(self, norms / b)

    patch = factors(change)
    return everywhere(patch, patch)


def counted_twice() -> dict[str, Patch | str]:
    """Every first example of a batch enters the sum twice."""

    def change(original: Any, self: Any, norms: Tensor) -> Tensor:
        out = original(self, norms).clone()
        out[:, :1] *= 2.0
        return out

    def load(original: Any) -> Any:
        """It has two places of a padded batch."""

        def twice(self: Any, *given: Any) -> None:
            original(self, *given)
            if 0 < self._filled < self.capacity:
                self.places[int((self.places == self.capacity).nonzero()[0])] = 0

        return twice

    patch = factors(change)
    return everywhere(patch, patch, compiled=attr(PaddedStep, "load", load))


def stale_sum() -> dict[str, Patch | str]:
    """The sum of the last batch is still there when the next one is added."""
    kept: dict[str, Any] = {}

    def add(key: str) -> Callable[[Any, tuple[Any, ...]], Any]:
        def change(call: Any, args: tuple[Any, ...]) -> Any:
            total = call()
            last = kept.get(key)
            kept[key] = total
            if last is None or isinstance(last, list) != isinstance(total, list):
                return total
            if isinstance(total, list):
                same = len(last) == len(total) and all(a.shape == b.shape for a, b in zip(last, total, strict=True))
                return [a + b for a, b in zip(last, total, strict=True)] if same else total
            return total + last if last.shape == total.shape else total

        return change

    return {path: sums(add(path), "at")[path] for path in PATHS}


def stale_parts() -> dict[str, Patch | str]:
    """A batch that was abandoned stays in the accumulator, and no guard asks."""

    def abandon(original: Any) -> Any:
        def keep(self: Any) -> None:
            self._batch.is_last = None
            self._batch.flags.clear()
            self._passes.forget(self.original_optimizer)

        return keep

    unasked = attr(LogicalBatch, "check_new", lambda original: lambda self, *, drawn: None)
    patch = both(attr(DPOptimizer, "abandon_virtual_batch", abandon), unasked)
    return everywhere(patch, "parts of a batch are summed in one call; nothing of them outlives it")


def cross_terms_dropped() -> dict[str, Patch | str]:
    def merged(original: Any) -> Any:
        def merge(uses: Any) -> Any:
            whole = original(uses)
            if len(uses) == 1:
                return whole

            class Parted(Dense):
                def squared_norm(self) -> Tensor:
                    return sum(u.squared_norm() for u in uses)  # type: ignore[return-value]

                def materialise(self) -> Tensor:
                    return self.g

            return Parted(whole.materialise())

        return merge

    # Small parameters are put side by side and their norm is taken of that, so the uses must stay apart here.
    apart = both(attr(bookkeeping, "merge", merged), lambda: mock.patch.object(side_by_side, "_SMALL", 0))
    return everywhere(unrehearsed(apart), apart)


def summed_by_another_product() -> dict[str, Patch | str]:
    """Positions and uses are measured one example at a time, and summed over all examples at once; without a rule, uses are
    measured together and summed apart."""

    def contract(original: Any) -> Any:
        def total(self: Outer, c: Tensor) -> Tensor:
            a, g = self.a.flatten(0, 1), (self.g * c.to(self.g).view(-1, 1, 1)).flatten(0, 1)
            made = (a.mT @ g if self.transposed else g.mT @ a).double()
            return made.reshape(self.shape) if self.order is None else self.order.restore(made.flatten())

        return total

    made = attr(Outer, "_grams_pay", lambda original: lambda self: False)
    kept = attr(uses, "settled", lambda original: lambda use: use)
    by_rule = both(made, kept, attr(Outer, "weighted_sum", contract))

    def merged(original: Any) -> Any:
        def merge(uses: Any) -> Any:
            class Apart(Dense):
                def weighted_sum(self, c: Tensor) -> Tensor:
                    return sum(u.weighted_sum(c) for u in uses)  # type: ignore[return-value]

            whole = original(uses)
            return whole if len(uses) == 1 else Apart(whole.materialise())

        return merge

    apart = both(attr(bookkeeping, "merge", merged), lambda: mock.patch.object(side_by_side, "_SMALL", 0))
    return everywhere(by_rule, by_rule, alone=apart)


def rows_of_a_table_rounded_apart() -> dict[str, Patch | str]:
    """Equal rows of an embedding are added up in fp32 for the norm; each is weighted and rounded by itself for the sum."""

    def apart(original: Any) -> Any:
        def total(self: Rows, c: Tensor) -> Tensor:
            weighted = (self.g * c.to(self.g).view(-1, 1, 1)).flatten(0, 1).double()
            return weighted.new_zeros(self.shape).index_add_(0, self.index.flatten(), weighted)

        return total

    patch = attr(Rows, "weighted_sum", apart)
    whole = "without a rule autograd makes the gradient of the whole table, which norm and sum both read"
    return everywhere(patch, patch, alone=whole)


def theta_samples_clipped_apart() -> dict[str, Patch | str]:
    """Each of K θ-samples is clipped by itself, and the sum has all of them under one charge."""

    def merged(original: Any) -> Any:
        def merge(uses: Any) -> Any:
            if len(uses) < 3:
                return original(uses)
            each = len(uses) // 3  # uses in one of three θ-samples
            samples = [original(uses[i : i + each]).materialise() for i in range(0, len(uses), each)]
            return Dense(torch.cat(samples))

        return merge

    return everywhere(attr(bookkeeping, "merge", merged), "a stack takes one θ-sample per step")


def old_bound() -> dict[str, Patch | str]:
    """A scheduler changes C in the spec, and clipping keeps the old one."""
    keep = attr(FlatClipping, "rescaled", lambda original: lambda self, bound: self)
    return everywhere(keep, "C is fixed for the life of a stack")


def rounded_norms() -> dict[str, Patch | str]:
    def change(original: Any, self: Any, norms: Tensor) -> Tensor:
        return original(self, norms.bfloat16().to(norms.dtype))

    patch = factors(change)
    return everywhere(patch, patch)


def biases_left_out() -> dict[str, Patch | str]:
    """Rows of the norm table that belong to vectors: every second one in these networks, and more if blocks are merged."""
    return norms_without(lambda n: list(range(1, n, 2)))


def one_copy_for_all_examples() -> dict[str, Patch | str]:
    """Layers without a rule share one copy of their parameters: everyone gets an equal share of the batch's gradient."""

    def shared(original: Any) -> Any:
        return lambda p: lambda g: {p: Dense(g.mean(0, keepdim=True).expand_as(g))}

    ruled = "its layers have rules, and none is copied for every example"
    return everywhere(ruled, ruled, alone=unrehearsed(attr(fallback, "_copies_of", shared)))
