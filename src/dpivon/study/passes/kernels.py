"""The paper's network in the kernels that train it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpivon.privacy.kernels.paper.layout import Layout


class KernelPasses:
    """All rows at once: :class:`dpivon.privacy.kernels.paper.forward.Forward`."""

    name = "kernels"
    at_once = 32768  # their answers are small; how many pictures go through at once is the kernels' business
    joins = True

    def __init__(self, layout: Layout, device: torch.device) -> None:
        from dpivon.privacy.kernels.paper.forward import Forward  # needs Triton

        self.forward = Forward(layout, device)

    def logits(self, rows: Sequence[Tensor], pictures: Tensor) -> Tensor:
        return self.forward.logits(torch.stack(list(rows)), pictures)
