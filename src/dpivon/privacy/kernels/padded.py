"""Any network's clipped sums without looking at a value, so that a CUDA graph may capture a whole step.

The runs' models live here for good, their parameters views of one buffer that each step's θ is copied into. Batches are
padded to one length, and the loss of a spare row is zero.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from dpivon.privacy.clipping import FlatClipping
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.kernels.batch import Batch
from dpivon.privacy.kernels.reference import RowModel, autocast
from dpivon.privacy.precision import full_precision


class ViewModel(RowModel, Protocol):
    def view(self, row: Tensor) -> nn.Module:
        """A model whose parameters are views of the row."""
        ...


class PaddedGradients:
    """Clipped sums, run by run, for capture. Its twin is :class:`~dpivon.privacy.kernels.reference.LoopedGradients`."""

    def __init__(self, network: ViewModel, runs: int, size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.network, self.dtype = network, dtype
        self.theta = torch.zeros(runs, size, device=device)
        self.models = [network.view(row) for row in self.theta]
        self.keepers = [BookKeeper(m, batch_first=True, loss_reduction="sum") for m in self.models]
        self._clipping: list[FlatClipping] = []

    def prepare(self, inputs: Tensor) -> Tensor:
        return inputs

    def clipped_sums(self, theta: Tensor, batch: Batch, bound: Tensor) -> Tensor:
        if not self._clipping:
            self._clipping = [FlatClipping(c) for c in bound.tolist()]
        self.theta.copy_(theta)
        sums = []
        for model, keeper, clipping, rows in zip(self.models, self.keepers, self._clipping, batch.places, strict=True):
            spare = rows >= len(batch.labels)
            rows = rows.clamp(max=len(batch.labels) - 1)
            params = [p for p in model.parameters() if p.requires_grad]
            keeper.clear(params)
            with torch.enable_grad():
                with autocast(theta.device, self.dtype):
                    outputs = model(batch.inputs[rows])
                losses = self.network.loss(outputs.float(), batch.labels[rows])
                losses.masked_fill(spare, 0.0).sum().backward()
            with full_precision():
                clipped = keeper.clipped_sums(params, clipping)
            keeper.forget_passes()
            sums.append(torch.cat([s.flatten() for s in clipped]))
        return torch.stack(sums)
