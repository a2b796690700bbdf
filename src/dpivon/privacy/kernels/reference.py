"""The drawn examples of all runs of a stack, and the reference for their clipped sums: one run after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from dpivon.errors import PrivacyError
from dpivon.privacy.augmentation import Augmentation, of_every_view
from dpivon.privacy.clipping import FLAT, Clipping
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.precision import full_precision


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


class RowModel(Protocol):
    """Rows of numbers as models, and the loss they are trained with."""

    def model(self, row: Tensor) -> nn.Module: ...

    def pack(self, model: nn.Module) -> Tensor: ...

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """One loss per example."""
        ...


EXAMPLES_AT_ONCE = 64  # so that activations stay in the cache, and cost grows no faster than the batch


class LoopedGradients:
    """Clipped sums, run by run."""

    def __init__(
        self,
        network: RowModel,
        dtype: torch.dtype,
        augment: Augmentation | None = None,
        clipping: Clipping = FLAT,
    ) -> None:
        self.network, self.dtype, self.augment, self.clipping = network, dtype, augment, clipping
        self.views = 1 if augment is None else augment.views

    def prepare(self, inputs: Tensor) -> Tensor:
        return inputs

    @full_precision()
    def clipped_sums(self, theta: Tensor, batch: Batch, bound: Tensor) -> Tensor:
        sums = torch.zeros(theta.shape, dtype=torch.float64, device=theta.device)
        for k, row in enumerate(theta):
            begin, end = int(batch.start[k]), int(batch.start[k + 1])
            if begin == end:
                continue
            model = self.network.model(row)
            params = [p for p in model.parameters() if p.requires_grad]
            clipped = self._sums(model, params, batch, slice(begin, end), self.clipping.rescaled(float(bound[k])))
            if not torch.equal(self.network.pack(model).view(torch.int32), row.view(torch.int32)):  # NaN is NaN
                raise PrivacyError(
                    "The model's forward has changed its parameters, which would carry private data around the mechanism. "
                    "Remove what writes to them."
                )
            model.double()  # the sums stay in double until the noise is in them
            with torch.no_grad():
                for p, s in zip(params, clipped, strict=True):
                    p.copy_(s)
            sums[k] = self.network.pack(model)
        return sums

    def _sums(
        self,
        model: nn.Module,
        params: list[nn.Parameter],
        batch: Batch,
        rows: slice,
        clipping: Clipping,
    ) -> list[Tensor]:
        keeper = BookKeeper(model, batch_first=True, loss_reduction="sum", augmentations=self.views)
        total: list[Tensor] = []
        at_once = max(1, EXAMPLES_AT_ONCE // self.views)
        for begin in range(rows.start, rows.stop, at_once):
            part = slice(begin, min(begin + at_once, rows.stop))
            labels = of_every_view(batch.labels[part], self.augment)
            with torch.enable_grad():
                with autocast(params[0].device, self.dtype):
                    outputs = model(seen(self.augment, batch.inputs[part], batch.views, part))
                self.network.loss(outputs.float(), labels).sum().backward()
            sums = keeper.clipped_sums(params, clipping)
            keeper.forget_passes()
            keeper.clear()
            total = [t + s for t, s in zip(total, sums, strict=True)] if total else sums
        keeper.detach_from_model()
        return total


def seen(augment: Augmentation | None, inputs: Tensor, views: Tensor | None, rows: slice | Tensor) -> Tensor:
    """What the model sees of these rows' inputs: themselves, or their views."""
    if augment is None:
        return inputs
    assert views is not None
    return augment.apply(inputs, views[rows])


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Forward passes in this precision."""
    low = dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(device.type, dtype if low else torch.bfloat16, enabled=low)
