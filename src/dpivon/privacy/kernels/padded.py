"""Any network's clipped sums as one fixed program: traced once through forward, backward and every layer's rule, then compiled.

Batches are padded to one length, and the loss of a spare row is zero. No value is looked at on the way, so that a CUDA graph
may capture the whole step. Tracing runs the ordinary book-keeping and records what it does, so there are no second rules to
keep in step with the first.

Where convolutions have kernels, images go through the network with their channels last, as the kernels and cuDNN read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from dpivon.privacy.clipping import FlatClipping
from dpivon.privacy.compiling import compiled
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.kernels import conv_ops
from dpivon.privacy.kernels.batch import Batch
from dpivon.privacy.kernels.reference import RowModel, autocast
from dpivon.privacy.precision import full_precision

Sums = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_GROUP_NORM = [torch.ops.aten.native_group_norm, torch.ops.aten.native_group_norm_backward]


class TemplateModel(RowModel, Protocol):
    def template(self) -> nn.Module:
        """A model of its own, for its structure; the rows hold its trained parameters one after the other."""
        ...


class PaddedGradients:
    """Clipped sums, run by run, for capture. Its twin is :class:`~dpivon.privacy.kernels.reference.LoopedGradients`."""

    def __init__(
        self, network: TemplateModel, device: torch.device, dtype: torch.dtype, *, channels_last: bool | None = None
    ) -> None:
        self.device = device
        self.step = _Step(network, device, dtype)
        convolves = any(isinstance(layer, nn.Conv2d) for layer in self.step.model.modules())
        kernels = conv_ops.wanted() and conv_ops.device_takes(device)
        self.step.channels_last = convolves and kernels if channels_last is None else channels_last
        self.params = {n: p for n, p in self.step.named_parameters() if p.requires_grad}
        self._program: dict[float, Sums] = {}
        self._bounds: tuple[Tensor | None, int, list[float]] = (None, -1, [])

    def prepare(self, inputs: Tensor) -> Tensor:
        return inputs

    def clipped_sums(self, theta: Tensor, batch: Batch, bound: Tensor) -> Tensor:
        with full_precision():
            sums = [
                self._compiled(c)(row, batch.inputs, batch.labels, places)
                for row, places, c in zip(theta, batch.places, self._numbers(bound), strict=True)
            ]
        return torch.stack(sums)

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
            _check_free_of_constants(traced, self.params.values())
            self._program[bound] = compiled(traced, self.device)
            return self._program[bound](*args)

        return self._program.get(bound, first)

    def _trace(self, bound: float, *args: Tensor) -> torch.fx.GraphModule:
        # torch's own group normalisation on a GPU returns its channels first; the compiler's, which is made of these parts, as
        # they came. What is recorded must be what the compiler finds.
        parts: Any = get_decompositions(_GROUP_NORM) if self.step.channels_last else None
        return make_fx(lambda *tensors: self._one(bound, *tensors), decomposition_table=parts)(*args)

    def _one(self, bound: float, row: Tensor, inputs: Tensor, labels: Tensor, places: Tensor) -> Tensor:
        parts = row.split([p.numel() for p in self.params.values()])
        values = {n: v.view_as(p).detach() for (n, p), v in zip(self.params.items(), parts, strict=True)}
        with torch.enable_grad():
            leaves = {n: v.requires_grad_() for n, v in values.items()}
            # Forward, backward and sums all happen inside: rules may read parameters too, and must find these.
            sums: Tensor = functional_call(self.step, leaves, (bound, inputs, labels, places))
        return sums


class _Step(nn.Module):
    """One run's clipped sum as a module, so that its parameters can be put in from outside."""

    def __init__(self, network: TemplateModel, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.device, self.dtype = network, device, dtype
        self.model = network.template().to(device)
        self.keeper = BookKeeper(self.model, batch_first=True, loss_reduction="sum")
        self.channels_last = False

    def forward(self, bound: float, inputs: Tensor, labels: Tensor, places: Tensor) -> Tensor:
        spare = places >= len(labels)
        places = places.clamp(max=len(labels) - 1)
        params: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        self.keeper.clear(params)
        with autocast(self.device, self.dtype):
            outputs = self.model(self._images(inputs[places]))
        self.network.loss(outputs.float(), labels[places]).masked_fill(spare, 0.0).sum().backward()
        sums = self.keeper.clipped_sums(params, FlatClipping(bound))
        self.keeper.forget_passes()
        return torch.cat([s.flatten() for s in sums])

    def _images(self, rows: Tensor) -> Tensor:
        turned = self.channels_last and rows.dim() == 4
        return rows.contiguous(memory_format=torch.channels_last) if turned else rows


def _check_free_of_constants(traced: torch.fx.GraphModule, params: Iterable[Tensor]) -> None:
    """The parameters must come in with every call: one that was recorded would stay what it was."""
    known = {p.data_ptr() for p in params}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            constant = getattr(traced, node.target)
            assert not isinstance(constant, Tensor) or constant.data_ptr() not in known, node
