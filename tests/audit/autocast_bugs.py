"""Bugs of a step inside the caller's autocast, where a product of fp32 comes out in bf16 unless somebody sees to it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from sowing import Patch, attr, both, everywhere
from torch import Tensor

import dpivon.privacy.gradients.bookkeeping as bookkeeping
import dpivon.privacy.gradients.side_by_side as side_by_side
import dpivon.privacy.kernels.padded_step as padded_step
import dpivon.privacy.optimizer as optimizer
import dpivon.stacked.stack as stacked
from dpivon.privacy.kernels.padded_step import PaddedStep
from dpivon.privacy.layers import fallback


def _unguarded(module: Any) -> Patch:
    return attr(module, "without_autocast", lambda original: lambda device: nullcontext())


def gradients_made_in_autocast() -> dict[str, Patch | str]:
    """A layer's rule makes gradients in backward. In bf16 their norm was rounded to bf16, and their sum was not."""
    # Small parameters are put side by side and measured as one matrix, in which the rounding is the same for norm and sum.
    rule = both(_unguarded(bookkeeping), lambda: mock.patch.object(side_by_side, "_SMALL", 0))
    kept = "without a rule autograd makes a gradient as autocast has it, and norm and sum read that one"
    stack = "a stack leaves the caller's autocast for the whole of a step"

    def whole(original: Any) -> Any:
        def inside(self: Any, *given: Any) -> Any:
            enabled, dtype = self._autocast
            with torch.autocast(self.device.type, dtype, enabled=enabled):
                return original(self, *given)

        return inside

    # A program leaves autocast before its backward, so the bug is to stay there.
    return everywhere(rule, stack, alone=kept, compiled=both(rule, attr(PaddedStep, "_pass", whole)))


def summed_in_autocast() -> dict[str, Patch | str]:
    """Of a stack all of the step: its gradients, its norms and its sums."""
    return everywhere(_unguarded(optimizer), _unguarded(stacked), compiled=_unguarded(padded_step))


class _Multiplied(torch.autograd.Function):
    """z, whose gradient is multiplied by the rows of the batch in its own precision."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, rows: int) -> Tensor:
        ctx.rows = rows
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.rows, None


def mean_undone_in_bf16() -> dict[str, Patch | str]:
    """An output's gradient is multiplied by the rows of the batch in bf16, after 1/B was rounded to it."""

    def rounded(original: Any) -> Any:
        def undone(z: Tensor, rows: int | None) -> Tensor:
            return z if rows is None or not z.requires_grad else _Multiplied.apply(z, rows)

        return undone

    def looped(original: Any) -> Any:
        def init(self: Any, *args: Any) -> None:
            original(self, *args)
            self._vectorises = False  # under vmap the layers would leave autocast, and give fp32

        return init

    patch = attr(bookkeeping, "loss_of_each", rounded)
    stack = "a stack adds up its losses: nothing is divided by the rows of the batch"
    program = "a program adds up its losses: nothing is divided by the rows of the batch"
    alone = both(patch, attr(fallback.Alone, "__init__", looped))
    return everywhere(patch, stack, alone=alone, compiled=program)
