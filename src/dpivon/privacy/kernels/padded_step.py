"""The clipped sum of one padded batch of the user's own loop, as one fixed program.

It is recorded from the eager book-keeping: the user's model and loss function, run once on the buffers, with their parameters
coming in from outside. The record is compiled, and a GPU replays it as a CUDA graph.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpivon.privacy.clipping import Clipping
from dpivon.privacy.forward_watch import marks
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.gradients.model_io import map_tensors, tensors_in
from dpivon.privacy.kernels import conv_ops
from dpivon.privacy.kernels.constants import as_compiled
from dpivon.privacy.kernels.padded import by_channels_last, laid_out, leaves, record
from dpivon.privacy.kernels.replay import Replay
from dpivon.privacy.layers.groups import Groups
from dpivon.privacy.layers.memory import Pool
from dpivon.privacy.precision import compiled, full_precision, without_autocast


class NotCaptured(Exception):
    """Why a step cannot be one fixed program."""


class _Holder(nn.Module):
    """A model whose parameters can be put in from outside while a function runs on it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self.model, *args)


class PaddedStep:
    """Buffers for a padded batch, the record of its clipped sum, and the graph that replays it.

    Args:
        keeper: the book-keeper of the model.
        model: as the loss function takes it.
        losses: from a batch to one loss per row, by way of the model.
        params: those that are trained, in the optimizer's order.
        clipping: the rule that bounds every example.
        batch: a batch, for its structure and shapes.
        capacity: how many examples a padded batch holds.
        each: how many rows an example has, or of a person at most.
        compiles: whether the model is told that torch compiles it.
    """

    def __init__(
        self,
        keeper: BookKeeper,
        model: nn.Module,
        losses: Callable[[Any], Tensor],
        params: Sequence[Tensor],
        clipping: Clipping,
        batch: Any,
        capacity: int,
        each: int,
        compiles: bool = False,
    ) -> None:
        self.keeper, self.losses, self.clipping, self.compiles = keeper, losses, clipping, compiles
        self.each, self.capacity, self.like = each, capacity, batch
        self.device = device = params[0].device
        self.buffers = [t.new_zeros(capacity * each, *t.shape[1:], device=device) for t in tensors_in(batch)]
        self.counts = torch.zeros(capacity * each, device=device)  # what each row of a person counts for
        self.places = torch.full((capacity,), capacity, device=device)
        self._filled = 0  # examples in the buffers
        self._holder = _Holder(model)
        self.sizes = [p.numel() for p in params]
        names = {id(t): name for name, t in self._holder.named_parameters()}
        self._names = [names[id(p)] for p in params]
        everything: dict[str, Tensor] = dict(self._holder.named_parameters()) | dict(self._holder.named_buffers())
        self._fixed = {name: t.detach() for name, t in everything.items() if name not in set(self._names)}
        self._trained = [p.detach() for p in params]
        several = keeper.samples > 1
        self.thetas = (
            [[t.clone() for t in self._trained] for _ in range(keeper.samples)] if several else [self._trained]
        )
        self._channels_last = by_channels_last(keeper.module, device)
        self._autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        self._recorded: Callable[..., tuple[Tensor, Tensor]] | None = None
        self.whole: Any = None  # the program of a whole release, which uses this one; False if there can be none
        self.replay = Replay(self._run, device)

    @property
    def captured(self) -> bool:
        return self.replay.graph is not None

    @property
    def settled(self) -> bool:
        """Whether it is recorded, and captured where that is possible."""
        return self.captured if self.device.type == "cuda" else self._recorded is not None

    @torch.no_grad()
    def load(self, tensors: Sequence[Tensor], generator: torch.Generator, people: Groups | None = None) -> None:
        """Put the rows of a batch into the buffers, those of each of its ``people`` together, and its examples at places that
        are drawn."""
        r, capacity = self.each, self.capacity
        if people is not None:
            index, counts = (self._moved(t) for t in people.padded(r))
            tensors = [t.to(self.device, non_blocking=True)[index] for t in tensors]
            self.counts[: len(counts)] = counts
        examples = len(tensors[0]) // r
        for buffer, t in zip(self.buffers, tensors, strict=True):
            buffer[: len(t)].copy_(t, non_blocking=True)
            if self._filled > examples:
                buffer[len(t) : self._filled * r].zero_()
        self._filled = examples
        places = torch.randperm(capacity, generator=generator)
        places.masked_fill_(places >= examples, capacity)
        self.places.copy_(self._moved(places))

    def _moved(self, t: Tensor) -> Tensor:
        return (t.pin_memory() if self.device.type == "cuda" else t).to(self.device, non_blocking=True)

    @torch.no_grad()
    def note_theta(self, k: int) -> None:
        """The parameters are the k-th θ now."""
        if self.thetas[k] is not self._trained:
            torch._foreach_copy_(self.thetas[k], self._trained)

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The clipped sums in a row, in double, and the sum of the losses."""
        row, loss = self.replay()
        parts = row.clone() if self.captured else row  # the next replay writes to it
        return parts, loss.clone() if self.captured else loss

    def at(self, thetas: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
        """The same with the parameters at these θ, computed without a graph of its own."""
        assert self._recorded is not None
        with full_precision(), without_autocast(self.device.type):
            return self._recorded(*self._values(thetas))

    def _values(self, thetas: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        given = (t for theta in thetas for t in theta)
        return [*given, *self._fixed.values(), self.places, self.counts, *self.buffers]

    @torch.no_grad()
    def _run(self) -> tuple[Tensor, Tensor]:
        self.record()
        return self.at(self.thetas)

    # ---- recording

    @torch.no_grad()
    def record(self) -> None:
        """Record the program, unless it is. Nothing is drawn for it: what fails here has used up no draw of the run."""
        if self._recorded is None:
            with full_precision(), without_autocast(self.device.type):
                self._recorded = self._record()

    def _record(self) -> Callable[..., tuple[Tensor, Tensor]]:
        device, keeper = self.device, self.keeper
        drawn, kept = _states(device), marks(keeper.tree)
        try:
            traced = self._trace()
        except RuntimeError:
            if not self._channels_last:
                raise
            self._channels_last = False  # a network that calls `view` on its images needs them as they are
            traced = self._trace()
        if _states(device) != drawn:
            raise NotCaptured("its forward draws random numbers outside the device's default generator")
        if marks(keeper.tree) != kept:
            raise NotCaptured("its forward changes attributes of the model")
        _check_writes(traced)
        made: Callable[..., tuple[Tensor, Tensor]] = compiled(
            traced, device, again=conv_ops.enabled and conv_ops.device_takes(device)
        )
        return made

    def _trace(self) -> torch.fx.GraphModule:
        keeper = self.keeper
        with keeper.aside(), _summed(keeper, self.each):
            known = [*self._trained, *self._fixed.values()]
            return record(self._sums, self._values(self.thetas), known, channels_last=self._channels_last)

    def _sums(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        count, keeper = len(self._names), self.keeper
        given, rest = list(tensors[: count * keeper.samples]), tensors[count * keeper.samples :]
        fixed, (places, counts, *buffers) = dict(zip(self._fixed, rest, strict=False)), rest[len(self._fixed) :]
        spare, seats = places >= len(places), places.clamp(max=len(places) - 1)
        spare = spare if self.each == 1 else spare.repeat_interleave(self.each)
        batch = self._batch(buffers, seats)
        if keeper.people is None:
            counted = None
        else:
            counted = self._seated(counts, seats).masked_fill(spare, 0.0)
            spare = counted == 0
        thetas = [leaves(self._names, given[k : k + count]) for k in range(0, len(given), count)]
        keeper.clear()
        losses = []
        with torch.enable_grad():
            for theta in thetas:
                last = theta is thetas[-1]
                losses.append(functional_call(self._holder, fixed | theta, (self._pass, batch, spare, counted)))
                for name, p in theta.items():
                    keeper.rename(p, thetas[0][name])
                if not last:
                    keeper.between_samples()
            row = keeper.clipped_row(list(thetas[0].values()), self.clipping)
        keeper.forget_passes()
        return row, torch.stack(losses).mean()

    def _batch(self, buffers: Sequence[Tensor], places: Tensor) -> Any:
        """The batch as the loss function takes it: every place's rows, in its order."""
        parts = iter([laid_out(self._seated(t, places), self._channels_last) for t in buffers])
        return map_tensors(lambda _: next(parts), self.like)

    def _seated(self, t: Tensor, places: Tensor) -> Tensor:
        r = self.each
        return t[places] if r == 1 else t.unflatten(0, (-1, r))[places].flatten(0, 1)

    def _pass(self, model: nn.Module, batch: Any, spare: Tensor, counted: Tensor | None) -> Tensor:
        enabled, dtype = self._autocast
        with as_compiled(self.compiles):  # also in backward, where a checkpoint runs layers again
            with torch.autocast(self.device.type, dtype, enabled=enabled):
                losses = self.losses(batch)
            losses = losses.masked_fill(spare, 0.0)
            (losses if counted is None else losses * counted).sum().backward()
        return losses.detach().float().sum()


@contextmanager
def _summed(keeper: BookKeeper, each: int) -> Iterator[None]:
    """Inside, the loss is the sum over rows, of which so many are an example; memory is new, and no write to the model is
    looked for: the record shows it."""
    before = keeper.loss_reduction, keeper.doubt, keeper.pool, keeper.alike
    keeper.loss_reduction, keeper.doubt, keeper.pool, keeper.alike = "sum", None, Pool(), Groups(each)
    try:
        yield
    finally:
        keeper.loss_reduction, keeper.doubt, keeper.pool, keeper.alike = before


def _states(device: torch.device) -> tuple[Any, ...]:
    """Of the generators whose draws would be the same in every replay."""
    own = torch.get_rng_state().numpy().tobytes() if device.type == "cuda" else b""
    return random.getstate(), str(np.random.get_state()), own


def _check_writes(traced: torch.fx.GraphModule) -> None:
    """Refuse a record in which something that comes in is written to, also through a view of it."""
    given = {node for node in traced.graph.nodes if node.op in ("placeholder", "get_attr")}
    for node in traced.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        written = [a for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        names = {a.name: i for i, a in enumerate(node.target._schema.arguments)}
        for argument in written:
            at = names[argument.name]
            value = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
            if any(v in given for v in (value if isinstance(value, list | tuple) else [value])):
                raise NotCaptured(f"its forward writes to a tensor that it was given ({node.target})")
        if node.target.is_view and node.args and node.args[0] in given:
            given.add(node)
