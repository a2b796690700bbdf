"""Any network's clipped sums as one fixed program: traced once through forward, backward and every layer's rule, then compiled.

Batches are padded to one length, and the loss of a spare row is zero. No value is looked at on the way, so that a CUDA graph
may capture the whole step. Tracing runs the ordinary book-keeping and records what it does, so there are no second rules to
keep in step with the first.

A batch that does not fit into memory at once is taken in parts of one size, all of them inside the captured step: the same
release, its sum added up in double. Where convolutions have kernels, images go through the network with their channels last, as
the kernels and cuDNN read them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from dpivon.privacy.augmentation import Augmentation, of_every_view
from dpivon.privacy.clipping import EXAMPLES_AT_ONCE, FLAT, Clipping
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.kernels import conv_ops
from dpivon.privacy.kernels.constants import constants_alone
from dpivon.privacy.kernels.reference import Batch, RowModel, autocast, seen
from dpivon.privacy.layers.uses import MEMORY_CAP, MEMORY_CAP_CUDA
from dpivon.privacy.precision import compiled, full_precision

#: Of a row of weights, inputs, labels, places, and views if there are any; compiled, of the row's parameters in place of the
#: row.
Sums = Callable[..., Tensor]
_SIDE = 16  # of images for which the layout matters on a CPU
_GROUP_NORM = [torch.ops.aten.native_group_norm, torch.ops.aten.native_group_norm_backward]


class TemplateModel(RowModel, Protocol):
    def template(self) -> nn.Module:
        """A model of its own, for its structure; the rows hold its trained parameters one after the other."""
        ...


class PaddedGradients:
    """Clipped sums, run by run, for capture. Its twin is :class:`~dpivon.privacy.kernels.reference.LoopedGradients`.

    ``at_once`` is how many examples of a run a pass takes; by default as many as memory allows. ``channels_last`` is how images
    go through the network; by default so where convolutions have kernels.
    """

    def __init__(
        self,
        network: TemplateModel,
        device: torch.device,
        dtype: torch.dtype,
        augment: Augmentation | None = None,
        clipping: Clipping = FLAT,
        *,
        at_once: int | None = None,
        channels_last: bool | None = None,
    ) -> None:
        self.device, self.network, self.at_once = device, network, at_once
        self.step = _Step(network, device, dtype, augment, clipping)
        chosen = by_channels_last(self.step.model, device) if channels_last is None else channels_last
        self.step.channels_last = chosen
        self.params = {n: p for n, p in self.step.named_parameters() if p.requires_grad}
        self._program: dict[float, Sums] = {}
        self._bounds: tuple[Tensor | None, int, list[float]] = (None, -1, [])

    def prepare(self, inputs: Tensor) -> Tensor:
        return inputs

    def clipped_sums(self, theta: Tensor, batch: Batch, bound: Tensor) -> Tensor:
        parts, views = self._parts(batch), () if batch.views is None else (batch.views,)
        sums = []
        with full_precision():
            for k, (row, c) in enumerate(zip(theta, self._numbers(bound), strict=True)):
                rest = [(batch.inputs, batch.labels, places[k], *views) for places in parts]
                # Asked for again for every part: the first part makes it, the others are to have the same.
                each = (self._compiled(c)(row, *part) for part in rest)
                sums.append(functools.reduce(torch.add, each))
        return torch.stack(sums)

    def _parts(self, batch: Batch) -> Sequence[Tensor]:
        """The runs' places in parts of one size; where they all fit at once, as they are."""
        if self.at_once is None:
            self.at_once = examples_at_once(self.network.template().to(self.device), batch.inputs, self.step.views)
        most = batch.places.shape[1]
        if most <= self.at_once:
            return [batch.places]
        size = -(-most // -(-most // self.at_once))  # the fewest parts, about equal
        whole = -(-size // EXAMPLES_AT_ONCE) * EXAMPLES_AT_ONCE  # whole blocks of a sum
        size = whole if whole <= self.at_once else size
        return F.pad(batch.places, (0, -most % size), value=len(batch.labels)).split(size, 1)

    def _numbers(self, bound: Tensor) -> list[float]:
        """The bounds, read once and again whenever they change: a capture cannot read them off the device, so it refuses a
        change instead of clipping to what they were. A graph that was captured keeps its own."""
        known, version, numbers = self._bounds
        if known is not bound or version != bound._version:
            numbers = bound.tolist()
            self._bounds = bound, bound._version, numbers
        return numbers

    def _compiled(self, bound: float) -> Sums:
        """The program for this bound, made when it is first used: all runs of one bound share it."""

        def first(*args: Tensor) -> Tensor:
            try:
                traced = self._trace(bound, *args)
            except RuntimeError:
                if not self.step.channels_last:
                    raise
                self.step.channels_last = False  # a network that calls `view` on its images needs them as they are
                traced = self._trace(bound, *args)
            program = compiled(traced, self.device, again=conv_ops.enabled and conv_ops.device_takes(self.device))
            self._program[bound] = lambda row, *rest: program(*self._parameters(row), *rest)
            return self._program[bound](*args)

        return self._program.get(bound, first)

    def _trace(self, bound: float, row: Tensor, *batch: Tensor) -> torch.fx.GraphModule:
        program = functools.partial(self._one, self.step.clipping.rescaled(bound))
        values = [*self._parameters(row), *batch]
        return record(program, values, self.params.values(), channels_last=self.step.channels_last)

    def _parameters(self, row: Tensor) -> Iterable[Tensor]:
        """The row's parameters, each an input of its own. Cut out of the row inside the program, a weight's place in it would
        be a constant of every kernel that reads it: layers of one shape could share none, and the compiler would try to join
        everything that reads the row. A row that begins anywhere is moved, once, to where its parameters are read fast."""
        if row.is_cuda and row.data_ptr() % 16:
            row = row.clone()
        return self._split(row).values()

    def _one(self, clipping: Clipping, *tensors: Tensor) -> Tensor:
        given, batch = tensors[: len(self.params)], tensors[len(self.params) :]
        with torch.enable_grad():
            # Forward, backward and sums all happen inside: rules may read parameters too, and must find these.
            sums: Tensor = functional_call(self.step, leaves(self.params, given), (clipping, *batch))
        return sums

    def _split(self, row: Tensor) -> dict[str, Tensor]:
        parts = row.split([p.numel() for p in self.params.values()])
        return {n: v.view_as(p) for (n, p), v in zip(self.params.items(), parts, strict=True)}


class _Step(nn.Module):
    """One run's clipped sum as a module, so that its parameters can be put in from outside."""

    def __init__(
        self,
        network: TemplateModel,
        device: torch.device,
        dtype: torch.dtype,
        augment: Augmentation | None,
        clipping: Clipping,
    ) -> None:
        super().__init__()
        self.network, self.device, self.dtype, self.augment, self.clipping = network, device, dtype, augment, clipping
        self.views = 1 if augment is None else augment.views
        self.model = network.template().to(device)
        self.keeper = BookKeeper(self.model, batch_first=True, loss_reduction="sum", augmentations=self.views)
        self.channels_last = False

    def forward(
        self,
        clipping: Clipping,
        inputs: Tensor,
        labels: Tensor,
        places: Tensor,
        views: Tensor | None = None,
    ) -> Tensor:
        spare = of_every_view(places >= len(labels), self.augment)
        places = places.clamp(max=len(labels) - 1)
        params: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        self.keeper.clear()
        with autocast(self.device, self.dtype):
            outputs = self.model(laid_out(seen(self.augment, inputs[places], views, places), self.channels_last))
        labels = of_every_view(labels[places], self.augment)
        self.network.loss(outputs.float(), labels).masked_fill(spare, 0.0).sum().backward()
        row = self.keeper.clipped_row(params, clipping)
        self.keeper.forget_passes()
        return row


def laid_out(rows: Tensor, channels_last: bool) -> Tensor:
    """Images as the network is to see them."""
    turned = channels_last and rows.dim() == 4
    return rows.contiguous(memory_format=torch.channels_last) if turned else rows


def leaves(names: Iterable[str], values: Sequence[Tensor]) -> dict[str, Tensor]:
    """Parameters to be put into a module, each a leaf that asks for a gradient."""
    return {name: v.detach().requires_grad_() for name, v in zip(names, values, strict=True)}


def record(
    program: Callable[..., Any], values: Sequence[Tensor], parameters: Iterable[Tensor], *, channels_last: bool
) -> torch.fx.GraphModule:
    """What the program does to these values, as a graph. The parameters come in with every call: one that was recorded would
    stay what it was."""
    # torch's own group normalisation on a GPU returns its channels first; the compiler's, which is made of these parts, as they
    # came. What is recorded must be what the compiler finds.
    parts: Any = get_decompositions(_GROUP_NORM) if channels_last else None

    def looked_at(*given: Tensor) -> Any:
        with constants_alone():
            return program(*given)

    traced = make_fx(looked_at, decomposition_table=parts)(*values)
    known = {p.data_ptr() for p in parameters}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            constant = getattr(traced, node.target)
            assert not isinstance(constant, Tensor) or constant.data_ptr() not in known, node
    return traced


def convolves(model: nn.Module, tensors: Sequence[Tensor]) -> bool:
    """Whether these are images, large enough for their layout to matter, and the model has convolutions for them."""
    large = any(t.dim() == 4 and min(t.shape[2:]) >= _SIDE for t in tensors)
    return large and any(isinstance(layer, nn.Conv2d) for layer in model.modules())


def by_channels_last(model: nn.Module, device: torch.device) -> bool:
    """Whether images go through the network with their channels last: where its convolutions have kernels."""
    has_convs = any(isinstance(layer, nn.Conv2d) for layer in model.modules())
    return has_convs and conv_ops.enabled and conv_ops.device_takes(device)


# ---- how many examples fit at once: a captured step cannot try and halve, so it must know before

CPU_MEMORY = 2 * 2**30
#: Tensors of an activation's size that live at once: the output itself, a wider copy, its gradient, and one on the way.
COPIES = 4
#: Below so many examples a pass is too small to fill a GPU, and large gradients are better left unmade.
WORTH_IT = 256


@dataclass
class Footprint:
    """Elements that one view of an example makes in a pass, and the largest weight with several positions."""

    activations: int = 0
    unfolded: int = 0
    largest: int = 0


def examples_at_once(model: nn.Module, inputs: Tensor, views: int) -> int:
    """As many as fit into a quarter of the device's memory; and where that is still plenty, so few that every layer's
    per-example gradients are kept: norms and sums then come from one product in place of four."""
    counted = footprint(model, inputs, views)
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    each = 4 * (views * (COPIES * counted.activations + counted.unfolded) + 2 * weights)
    fit = _memory(inputs.device) // each
    kept = (MEMORY_CAP_CUDA if inputs.is_cuda else MEMORY_CAP) // (4 * max(1, counted.largest))
    return int(max(1, min(fit, kept) if kept >= WORTH_IT else fit))


def footprint(model: nn.Module, inputs: Tensor, views: int = 1) -> Footprint:
    """Counted at the model's layers, on one example of zeros of the inputs' shape."""
    found = Footprint()

    def count(layer: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        found.activations += output.numel()
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() > 1:
            positions = output.numel() // weight.shape[0]
            found.unfolded += positions * weight[0].numel()
            if views * positions > 1:
                found.largest = max(found.largest, weight.numel())

    handles = [layer.register_forward_hook(count) for layer in model.modules() if not any(layer.children())]
    device = inputs.device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            model(inputs.new_zeros(1, *inputs.shape[1:]))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _memory(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_MEMORY
    return int(torch.cuda.get_device_properties(device).total_memory) // 4
