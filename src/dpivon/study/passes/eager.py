"""Row by row through one model, as torch runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from dpivon.stacked import Network

AT_ONCE = 64  # on a CPU: what stays in a core's cache
LARGE = 5000  # on a GPU: enough to fill it, and launches cost nothing beside it


class EagerPasses:
    """The twin that every other way is held to. There is one model, into which every row is put."""

    name = "torch's own operations"
    joins = False  # a set's scores do not depend on what stands beside it, to the last bit

    def __init__(self, network: Network, device: torch.device) -> None:
        self.network = network
        self.at_once = LARGE if device.type == "cuda" else AT_ONCE
        self._model: nn.Module | None = None

    def logits(self, rows: Sequence[Tensor], pictures: Tensor) -> Iterator[Tensor]:
        if self._model is None:
            self._model = self.network.model(rows[0]).eval()
        pictures = _laid_out(pictures)
        for row in rows:
            yield self.network.load(row, self._model)(pictures)


def _laid_out(pictures: Tensor) -> Tensor:
    """Channels last on a CPU, whose convolutions and norms are about twice as fast so; a GPU's norms want them first."""
    if pictures.is_cuda or pictures.dim() != 4:
        return pictures
    return pictures.contiguous(memory_format=torch.channels_last)
