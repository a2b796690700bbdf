"""The obvious twin of the kernels: one run after the other through the book-keeping of a single model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from dpivon.privacy.clipping import FlatClipping
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.kernels.batch import Batch


class RowModel(Protocol):
    """Rows of numbers as models, and the loss they are trained with."""

    def model(self, row: Tensor) -> nn.Module: ...

    def pack(self, model: nn.Module) -> Tensor: ...

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """One loss an example."""
        ...


class LoopedGradients:
    """Clipped sums, run by run."""

    def __init__(self, network: RowModel, dtype: torch.dtype) -> None:
        self.network, self.dtype = network, dtype

    def prepare(self, inputs: Tensor) -> Tensor:
        return inputs

    def clipped_sums(self, theta: Tensor, batch: Batch, bound: Tensor) -> Tensor:
        sums = torch.zeros(theta.shape, dtype=torch.float64, device=theta.device)
        for k, row in enumerate(theta):
            begin, end = int(batch.start[k]), int(batch.start[k + 1])
            if begin == end:
                continue
            model = self.network.model(row)
            keeper = BookKeeper(model, batch_first=True, loss_reduction="sum")
            with torch.enable_grad():
                with autocast(row.device, self.dtype):
                    outputs = model(batch.inputs[begin:end])
                self.network.loss(outputs.float(), batch.labels[begin:end]).sum().backward()
            params = [p for p in model.parameters() if p.requires_grad]
            clipped = keeper.clipped_sums(params, FlatClipping(float(bound[k])))
            keeper.detach_from_model()
            model.double()  # the sums stay in double until the noise is in them
            with torch.no_grad():
                for p, s in zip(params, clipped, strict=True):
                    p.copy_(s)
            sums[k] = self.network.pack(model)
        return sums


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Forward passes in this precision."""
    low = dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(device.type, dtype if low else torch.bfloat16, enabled=low)
