"""The paper's CNN as a program: on a GPU all runs at once, in the kernels of :mod:`dpivon.privacy.kernels.paper`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpivon.errors import bad
from dpivon.models import PaperCNN
from dpivon.optim.curvature import Matrices, matrix
from dpivon.privacy.augmentation import Augmentation
from dpivon.privacy.clipping import FLAT, Clipping, FlatClipping
from dpivon.privacy.kernels.paper.layout import Layout
from dpivon.privacy.stack import StackedGradients
from dpivon.stacked.networks import AnyNetwork, register_program


class PaperNetwork(AnyNetwork):
    """The paper's CNN: all runs at once in kernels on a GPU, the loop elsewhere."""

    def __init__(self, layout: Layout | None = None) -> None:
        self.layout = Layout() if layout is None else layout
        o = self.layout
        super().__init__(
            lambda: PaperCNN(widths=o.widths, hidden=o.hidden, classes=o.classes, groups=o.groups, image_size=o.image)
        )

    def check(self, inputs: Tensor, labels: Tensor, rows: int) -> None:
        """Nothing to find out: the network and its loss are the library's own."""

    @property
    def matrices(self) -> Matrices:
        # The kernels keep a tensor's outputs last; rows and columns change places, which no estimator minds.
        turned = [matrix(shape[::-1]) for shape in self.layout.shapes.values()]
        return [(columns, rows) if rows > 1 else (rows, columns) for rows, columns in turned]

    def pack(self, model: nn.Module) -> Tensor:
        assert isinstance(model, PaperCNN)
        return self.layout.pack(model)

    def load(self, row: Tensor, model: nn.Module) -> nn.Module:
        assert isinstance(model, PaperCNN)
        return self.layout.unpack(row, model)

    def gradients(
        self,
        runs: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        augment: Augmentation | None = None,
        clipping: Clipping = FLAT,
    ) -> StackedGradients:
        if device.type != "cuda":
            return super().gradients(runs, capacity, device, dtype, augment, clipping)
        if augment is not None:
            raise bad(
                "augment", augment, "the kernels of the paper's network make no views", "Use AnyNetwork(network.build)"
            )
        if type(clipping) is not FlatClipping:
            fix = "Use AnyNetwork(network.build)"
            raise bad("clipping", clipping.name, "is not known to the kernels of the paper's network", fix)
        from dpivon.privacy.kernels.paper.program import Program

        return Program(self.layout, runs, capacity, device, dtype)


def _as_published(model: nn.Module) -> PaperNetwork | None:
    return PaperNetwork() if repr(model) == repr(PaperCNN()) else None  # nothing added, replaced or resized


register_program(PaperCNN, _as_published)
