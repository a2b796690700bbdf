"""The obvious twin of the kernels: one run after the other through the book-keeping of a single model."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpivon.privacy.clipping import FlatClipping
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.kernels.batch import Batch


class RowModel(Protocol):
    def model(self, row: Tensor) -> nn.Module: ...

    def pack(self, model: nn.Module) -> Tensor: ...


class LoopedGradients:
    """Clipped sums of cross-entropy gradients, run by run."""

    def __init__(self, network: RowModel, device: torch.device) -> None:
        self.network, self.device = network, device

    def clipped_sums(self, theta: Tensor, batch: Batch, bound: Tensor) -> tuple[Tensor, Tensor]:
        sums = torch.zeros(theta.shape, dtype=torch.float64, device=theta.device)
        norms = torch.zeros(batch.places.shape, device=theta.device)
        for k, row in enumerate(theta):
            begin, end = int(batch.start[k]), int(batch.start[k + 1])
            if begin == end:
                continue
            model = self.network.model(row)
            params = list(model.parameters())
            keeper = BookKeeper(model, batch_first=True, loss_reduction="sum")
            with torch.enable_grad():
                logits = model(batch.images[begin:end].permute(0, 3, 1, 2).to(row.dtype))
                F.cross_entropy(logits, batch.labels[begin:end], reduction="sum").backward()
            clipped = keeper.clipped_sums(params, FlatClipping(float(bound[k])))
            keeper.detach_from_model()
            model.double()  # the sums stay in double until the noise is in them
            with torch.no_grad():
                for p, s in zip(model.parameters(), clipped, strict=True):
                    p.copy_(s)
            sums[k] = self.network.pack(model)
        return sums, norms
