"""Clipped sums from materialised per-example gradients, as Opacus leaves them in ``p.grad_sample``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor, nn

from dpivon.errors import PrivacyError
from dpivon.optim.metric import Factors
from dpivon.privacy.clipping import Clipping, clipped_sum
from dpivon.privacy.gradients.collect import clear_pass
from dpivon.privacy.precision import wide


class PerExampleGradients:
    """``augmentations`` consecutive rows are the augmentations of one example: their gradients are averaged before
    clipping, so that the example is clipped, and charged, once."""

    def __init__(self, module: nn.Module, augmentations: int = 1) -> None:
        self.module = module
        self.augmentations = augmentations
        self._average: dict[Tensor, Tensor] = {}

    def clipped_sums(
        self, params: Sequence[Tensor], clipping: Clipping, metric: Sequence[Factors] | None = None
    ) -> list[Tensor]:
        samples = self._rows(params)
        for p in params:
            _check_processed_flag(_grad_sample(p))
        rows = {len(s) for s in samples}
        if len(rows) > 1:
            raise PrivacyError(
                f"Per-example gradients of {sorted(rows)} examples: the parameters disagree about the batch. "
                "Call optimizer.zero_grad() and run forward and backward on one batch."
            )
        rows_of = [self._merge_augmentations(s) for s in samples]
        if metric is not None:
            rows_of = [wide(s) * f.full(s.shape[1:]).to(wide(s[:0])) for s, f in zip(rows_of, metric, strict=True)]
        sums = clipped_sum(rows_of, clipping)
        for p in params:
            _mark_as_processed(_grad_sample(p))
        return sums

    def end_of_sample(self, params: Sequence[Tensor], samples: int) -> None:
        if samples == 1:
            return
        for p, rows in zip(params, self._rows(params), strict=True):
            share = rows / samples
            self._average[p] = self._average[p] + share if p in self._average else share
            _set_grad_sample(p, self._average[p])
            p.grad = None

    def begin_sample(self, params: Sequence[Tensor]) -> None:
        self._empty()

    def batches(self, params: Sequence[Tensor]) -> int:
        counts = {
            len(gs) if isinstance(gs := _grad_sample(p), list) else 1 for p in params if _grad_sample(p) is not None
        }
        if len(counts) > 1:
            raise PrivacyError(
                f"The parameters saw {sorted(counts)} batches: call optimizer.zero_grad() and start the step over."
            )
        return counts.pop() if counts else 1

    def clear(self, params: Sequence[Tensor]) -> None:
        self._average.clear()
        self._empty()

    def _empty(self) -> None:
        """Also of parameters that were frozen since: thawed, they would bring rows of an earlier batch into this one."""
        for p in self.module.parameters():
            _set_grad_sample(p, None)

    def forget_passes(self) -> None:
        clear_pass(self.module)

    def _rows(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Per-example gradients of every parameter; zeros for one that the pass did not use."""
        found = [_grad_sample(p) for p in params]
        first = next((f for f in found if f is not None), None)
        if first is None:
            raise PrivacyError(
                "step() without per-example gradients: run forward through the model that make_private returned and call "
                "loss.backward() first."
            )
        for p, f in zip(params, found, strict=True):
            if f is None and p.grad is not None:
                raise PrivacyError(
                    f"A parameter of shape {tuple(p.shape)} has a gradient but no per-example gradient, so it cannot be "
                    "clipped. Use it only through its layer, or choose another grad_sample_mode."
                )
        examples = sum(len(f) for f in first) if isinstance(first, list) else len(first)
        return [
            torch.cat(f) if isinstance(f, list) else f if f is not None else p.new_zeros(examples, *p.shape)
            for p, f in zip(params, found, strict=True)
        ]

    def _merge_augmentations(self, rows: Tensor) -> Tensor:
        m = self.augmentations
        if m == 1:
            return rows
        if len(rows) % m:
            raise PrivacyError(
                f"augmentations={m} but the batch has {len(rows)} rows: give every example {m} consecutive rows."
            )
        return rows.reshape(len(rows) // m, m, *rows.shape[1:]).mean(dim=1)


def _grad_sample(p: Tensor) -> Any:
    return getattr(p, "grad_sample", None)


def _set_grad_sample(p: Tensor, value: Tensor | None) -> None:
    p.grad_sample = value  # type: ignore[attr-defined]
