"""Any network as torch compiles it, row by row."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpivon.privacy.precision import compiled
from dpivon.stacked import Network

PICTURES = 2048  # a call: the compiled program has this one shape


class CompiledPasses:
    """One model with memory of its own, into which every row is copied, so that the program finds it where it was compiled for.

    Pictures come in calls of one size, the last of them padded, and with their channels last where the model convolves.
    """

    at_once = 16 * PICTURES
    joins = True

    def __init__(
        self, network: Network, device: torch.device, *, channels_last: bool, pictures: int = PICTURES
    ) -> None:
        self.network, self.device, self.pictures = network, device, pictures
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.name = "a compiled network" + (", channels last" if channels_last else "")
        self._loose: nn.Module | None = None

    def logits(self, rows: Sequence[Tensor], pictures: Tensor) -> Iterator[Tensor]:
        n = len(pictures)
        calls = self._calls(pictures)
        for row in rows:
            self._load(row)
            yield torch.cat([self._run(call) for call in calls])[:n]

    def _calls(self, pictures: Tensor) -> Sequence[Tensor]:
        short = -len(pictures) % self.pictures
        padded = F.pad(pictures, (*(0, 0) * (pictures.dim() - 1), 0, short)) if short else pictures
        padded = padded.contiguous(memory_format=self.format if pictures.dim() == 4 else torch.contiguous_format)
        return padded.split(self.pictures)

    def _load(self, row: Tensor) -> None:
        """A network may put a row into a model without copying it; the compiled model keeps its own memory."""
        if self._loose is None:
            self._loose = self.network.model(row).eval()
            self._fixed = copy.deepcopy(self._loose).to(memory_format=self.format)  # type: ignore[call-overload]
            self._run = compiled(self._fixed, self.device)
        loaded = self.network.load(row, self._loose)
        for mine, theirs in zip(self._fixed.parameters(), loaded.parameters(), strict=True):
            mine.copy_(theirs)


def convolves(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.Conv2d) for layer in model.modules())
