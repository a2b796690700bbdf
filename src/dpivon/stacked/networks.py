"""What a stack trains: a network whose parameters are one row of numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpivon.errors import bad
from dpivon.models import PaperCNN
from dpivon.optim.curvature import Matrices, matrix
from dpivon.privacy.augmentation import Augmentation, used
from dpivon.privacy.clipping import FLAT, Clipping, FlatClipping
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.guards import check_model
from dpivon.privacy.independence import check_loss_rows, check_model_rows
from dpivon.privacy.kernels.padded import PaddedGradients
from dpivon.privacy.kernels.paper.layout import Layout
from dpivon.privacy.kernels.reference import LoopedGradients
from dpivon.privacy.losses import one_each
from dpivon.privacy.stack import StackedGradients


class Network(Protocol):
    """How rows and models correspond, and who computes the clipped sums of K rows."""

    @property
    def size(self) -> int: ...

    @property
    def matrices(self) -> Matrices:
        """(rows, columns) of every tensor in a row of numbers, in their order."""
        ...

    def initial(self, seed: int) -> Tensor:
        """A freshly initialised row."""
        ...

    def model(self, row: Tensor) -> nn.Module:
        """A model with these parameters."""
        ...

    def load(self, row: Tensor, model: nn.Module) -> nn.Module:
        """Put other parameters into a model that :meth:`model` made."""
        ...

    def gradients(
        self,
        runs: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        augment: Augmentation | None = None,
        clipping: Clipping = FLAT,
    ) -> StackedGradients: ...


def trained(model: nn.Module) -> list[nn.Parameter]:
    """What a row holds: frozen parameters stay as the network's template has them."""
    return [p for p in model.parameters() if p.requires_grad]


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of logits and classes, one loss per example; silently zero where the label is none of the classes.

    torch would raise, in whichever step such a record is first drawn: an exception that tells of the data.
    """
    if labels.is_floating_point():  # a probability of every class
        return F.cross_entropy(outputs, labels, reduction="none")
    known = (labels >= 0) & (labels < outputs.shape[1])
    losses = F.cross_entropy(outputs, labels.where(known, 0), reduction="none")
    return losses.where(known, 0.0)


class AnyNetwork:
    """Any model made of layers with rules, one run after the other.

    ``build`` makes the model; ``loss(outputs, labels)`` gives one loss per example, each from that example alone.
    """

    def __init__(
        self, build: Callable[[], nn.Module], loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    ) -> None:
        self.build, self.loss, self.given_loss = build, one_each(loss), loss
        self._checked: set[tuple[object, ...]] = set()  # structures of data for which rows were found to be examples
        self._template = build()
        check_model(self._template)

    @property
    def size(self) -> int:
        return sum(p.numel() for p in trained(self._template))

    @property
    def matrices(self) -> Matrices:
        return [matrix(p.shape) for p in trained(self._template)]

    def initial(self, seed: int) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.pack(self.build())

    def pack(self, model: nn.Module) -> Tensor:
        return nn.utils.parameters_to_vector(trained(model)).detach()

    def model(self, row: Tensor) -> nn.Module:
        return self.load(row, copy.deepcopy(self._template).to(row.device))

    def load(self, row: Tensor, model: nn.Module) -> nn.Module:
        nn.utils.vector_to_parameters(row, trained(model))
        return model

    def template(self) -> nn.Module:
        """A model of this structure."""
        return copy.deepcopy(self._template)

    def check(self, inputs: Tensor, labels: Tensor, rows: int) -> None:
        """Refuse a model or a loss in which one example changes another's part. Shapes and types are used, no data.

        ``rows`` is how large batches are.
        Parameters that are expanded to one copy per example stay so in a recorded program; where that is not what an example
        gives alone, the model is refused.
        """
        structure = inputs.shape[1:], inputs.dtype, labels.shape[1:], labels.dtype
        if structure in self._checked:
            return
        model = self.template()
        keeper = BookKeeper(model, batch_first=True, loss_reduction="sum")
        device = trained(model)[0].device
        shapes = [torch.empty((rows, *t.shape[1:]), dtype=t.dtype, device=device) for t in (inputs, labels)]
        check_model_rows(keeper, (shapes[0],), {}, falls_back=False)
        check_loss_rows(keeper, lambda model, batch: self.loss(model(batch[0]), batch[1]), shapes)
        self._checked.add(structure)

    def gradients(
        self,
        runs: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        augment: Augmentation | None = None,
        clipping: Clipping = FLAT,
    ) -> StackedGradients:
        if device.type == "cuda":
            return PaddedGradients(self, device, dtype, augment, clipping)
        return LoopedGradients(self, dtype, augment, clipping)


#: Programs of their own for models of one class: a function that returns one for a model, or None where it does not apply.
PROGRAMS: dict[type[nn.Module], Callable[[nn.Module], AnyNetwork | None]] = {}


def register_program(kind: type[nn.Module], make: Callable[[nn.Module], AnyNetwork | None]) -> None:
    """Train models of this class by a program of their own.

    It is written for cross entropy, flat clipping and examples without augmentation; anything else takes the general one.

    Args:
        kind: exactly this class.
        make: returns the program for a model, or None for one that is not as its class makes it.
    """
    PROGRAMS[kind] = make


def network_for(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    augment: Augmentation | None = None,
    clipping: str | Clipping = "flat",
) -> AnyNetwork:
    """The fastest way to train this model with this loss: a registered program, or else the general one."""
    plain = loss is cross_entropy and used(augment) is None and clipping == "flat"
    trained_whole = all(p.requires_grad for p in model.parameters())
    program = PROGRAMS[type(model)](model) if plain and trained_whole and type(model) in PROGRAMS else None
    return AnyNetwork(lambda: copy.deepcopy(model), loss) if program is None else program


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
