"""Clipped sums by book-keeping: one forward, one backward, per-example norms, one weighted contraction.

Every layer's weights are detached while it runs, so autograd computes output gradients only; the layer's rule turns its input
and its output's gradient into a *use* of each parameter. When backward is done the uses know every example's norm, and one
weighted contraction gives the clipped sum. Ordinary weight gradients are never computed. (Bu et al., *Differentially Private
Optimization on Large Model at Small Cost*, 2023.)

A parameter that is also used outside its layer's forward is not detached there, so it gets a ``p.grad``, and
``step()`` refuses.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.errors import PrivacyError
from dpivon.privacy.clipping import Clipping, clip_factors, dropped_examples
from dpivon.privacy.gradients.means import Seed, intercept_backward, loss_of_each
from dpivon.privacy.gradients.model_io import Arrival, Kept, Unattributed, Uses, map_tensors, structure, tensors_in
from dpivon.privacy.gradients.side_by_side import dtype_of_sums, in_blocks, neighbours, split, squared_norms
from dpivon.privacy.gradients.watching import LayerWatch, has_rules
from dpivon.privacy.layers.groups import Groups
from dpivon.privacy.layers.memory import Pool, settle_allocator
from dpivon.privacy.layers.uses import Dense, Use, merge, settled
from dpivon.privacy.made_up import NotTried
from dpivon.privacy.precision import capturing, surroundings, without_autocast

__all__ = ["BookKeeper", "has_rules"]

Batch = dict[Tensor, list[Use]]
_SECOND_PASS = (
    "A second forward and backward before step(): an example could be clipped twice in one release. Call step() after every "
    "backward; use dpivon.BatchMemoryManager for large batches."
)


@dataclass
class _Passes:
    """What the forward and backward passes of one step have left so far."""

    batches: list[Batch] = field(default_factory=lambda: [defaultdict(list)])
    kept: Kept = field(default_factory=Kept)  # what the uses hold
    recorded: int | None = None  # the forward whose gradients arrived
    arrived: bool = False
    second: bool = False  # whether a second pass came where one is allowed
    taken: bool = False  # whether they were summed, and nothing was cleared since
    sums: list[Tensor] | None = None  # of a program that computed them in place of passes here


class BookKeeper(LayerWatch):
    """Watches the layers of a model and keeps the uses of their parameters. It is the optimizer's source of clipped sums.

    Args:
        module: the model.
        batch_first: whether the batch is dimension 0 or 1 of what the model takes and returns.
        loss_reduction: whether the loss is the ``"mean"`` or the ``"sum"`` over the rows of a batch.
        samples: how many passes over the same examples are averaged.
        augmentations: how many consecutive rows are one example, or one row of a person.
        people: which of so many rows at hand, of these inputs, are one person's, where an example is a person.
        scatter: keeps a part of each sum, where the model is sharded.
        accumulates: whether several batches may be summed in one step, which is not private under Poisson sampling.
        keeps_gradients: whether per-example gradients are left in ``p.grad_sample``, as Opacus does.
        on_first: called with the book-keeper and the arguments of the first forward pass of every new structure, before it.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        batch_first: bool,
        loss_reduction: str,
        samples: int = 1,
        augmentations: int = 1,
        people: Callable[[int, Any], Groups] | None = None,
        scatter: Callable[[Tensor, Tensor], Tensor] | None = None,
        accumulates: bool = False,
        keeps_gradients: bool = False,
        on_first: Callable[[BookKeeper, Any, Any], None] | None = None,
    ) -> None:
        super().__init__(module, batch_first=batch_first, scatter=scatter, tried=on_first is not None)
        self.loss_reduction = loss_reduction
        self.samples, self.augmentations = samples, augmentations
        self.people = people
        self._groups = self.alike = Groups(augmentations)  # the former of the batch at hand
        self.accumulates, self.keeps_gradients = accumulates, keeps_gradients
        self.on_first = on_first
        self._known: set[Any] = set()  # structures of inputs that were seen
        self._untried: NotTried | None = None
        self.breaks_with_ignored = False  # whether labels of -100 among the inputs let examples depend on each other
        self.rehearses = False  # whether passes are on made-up inputs
        self.doubt: Tensor | None = None  # on a GPU: whether a forward wrote to the model, so that no gradient counts
        self._passes = _Passes()
        self.pool = Pool()
        settle_allocator()
        intercept_backward()
        self._generation = 0
        self._running = False  # inside the model's forward
        self._pass = 0  # the forward that is running, or ran last
        self._task, self._captures = -1, False  # the backward that is running, and whether it is captured
        self._attach_to_model()
        self._hook_root(module.register_forward_pre_hook, self._begin_forward, with_kwargs=True, prepend=True)
        self._hook_root(module.register_forward_hook, self._end_forward, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> BookKeeper:
        """A book-keeper of the copied model. The hooks that the copy shares with the original leave it alone."""
        new = BookKeeper(
            copy.deepcopy(self.module, memo),
            batch_first=self.batch_first,
            loss_reduction=self.loss_reduction,
            samples=self.samples,
            augmentations=self.augmentations,
            people=self.people,
            scatter=self._scatter,
            accumulates=self.accumulates,
            keeps_gradients=self.keeps_gradients,
            on_first=self.on_first,
        )
        memo[id(self)] = new
        return new

    # ---- recording uses

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._recording(module):
            self.rows = self._rows_of(args, kwargs)
            self.positions = self.positions_of(args, kwargs)
            people = None if self.rehearses else self.people
            self._groups = self.alike if people is None else people(self.rows, (args, kwargs))
            self._announce(args, kwargs)
            if self._passes.arrived and not self.accumulates:
                self._passes.second = True
            self._pass += 1
        self._running = True

    def _rows_of(self, args: Any, kwargs: Any) -> int:
        sizes = [t.shape[self.dim] for t in tensors_in((args, kwargs)) if t.dim() > self.dim]
        if not sizes:
            raise PrivacyError(
                f"The model {type(self.module).__name__} was given no tensor with a batch dimension, so nothing says what an "
                "example is. Pass the batch as a tensor, or as tensors in a tuple, list or dict."
            )
        return sizes[0]

    def _announce(self, args: Any, kwargs: Any) -> None:
        """Say that inputs of a new structure, or other trainable layers, are about to be seen for the first time."""
        if self.on_first is None or capturing():
            return
        layers = self.tree.layers()
        training = [layer.training for _, layer in layers]
        own = [layer._parameters for _, layer in layers]
        trained = [p is not None and p.requires_grad for p in chain.from_iterable(map(dict.values, own))]
        state = bytes(training), bytes(trained), tuple(map(len, own))
        known = structure((args, kwargs)), state, torch.compiler.is_compiling()  # which models may ask too
        self._untried = None
        if known not in self._known:
            try:
                self.on_first(self, args, kwargs)
            except NotTried as error:
                self._untried = error  # if the model itself cannot run, that is what its caller wants to know
                return
            self._known.add(known)

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._running = False
        if not self._recording(module) or output is None:
            return None
        if self._untried is not None:
            raise self._untried
        rows = self.rows if self.loss_reduction == "mean" else None
        return map_tensors(lambda z: loss_of_each(z, rows), output)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, passes are kept apart from those of the step under way, and forgotten at the end."""
        passes = self._passes, self._running, self.on_first, self._generation
        batch = self.rows, self.positions, self._groups
        self._passes, self.on_first, self.rehearses = _Passes(), None, True
        try:
            yield
        finally:
            self._passes, self._running, self.on_first, self._generation = passes
            self.rows, self.positions, self._groups = batch
            self.rehearses = False

    def _observe(
        self, z: Tensor, uses: Uses, saved: Sequence[Any] = (), *, batch_major: bool = False, layer: str = ""
    ) -> Tensor:
        """Arrange that the gradient of z becomes uses when backward reaches it. ``saved`` must not change until then.

        A checkpoint that recomputes a forward inside backward comes here again; of the two z's only one gets a gradient.
        """
        first = not z.requires_grad  # no product of the backward pass will read its gradient
        if first:
            seed = torch.zeros((), device=z.device, requires_grad=True)
            z = Seed.apply(z, seed)  # type: ignore[no-untyped-call]
        z.register_hook(Arrival(self, uses, saved, first=first, batch_major=batch_major, layer=layer))
        return z

    def _note_pass(self, origin: int) -> None:
        """Rows of two forwards are different examples: clipped as one, each could move the sum by 2C."""
        passes = self._passes
        if passes.recorded not in (None, origin):
            if self.keeps_gradients and not self.accumulates:  # where Opacus raises, too
                raise PrivacyError(_SECOND_PASS)
            if not self.accumulates:
                passes.second = True
            elif passes.batches[-1]:
                passes.batches.append(defaultdict(list))
        passes.recorded = origin

    def _record(self, uses: Uses, g: Tensor, layer: str) -> None:
        passes, groups = self._passes, self._groups
        passes.arrived = True
        positions = 1 if g.shape[0] == self.rows else self.rows_of_each(g.shape[0], layer)
        # Inside the caller's autocast a product of fp32 would come out in bf16, and its norm be taken in bf16.
        task = torch._C._current_graph_task_id()
        if task != self._task or task == -1:
            self._task, self._captures = task, capturing()
        rows, batch = groups.most * positions, passes.batches[-1]
        around = surroundings(pool=self.pool, rows=rows, capturing=self._captures)
        with around, without_autocast(g.device.type):
            found = uses(g.detach() if g.requires_grad else g)
        if positions > 1:
            found = {p: use.grouped(positions) for p, use in found.items()}
        if rows > 1:
            found = {p: groups.added_up(use) if groups.most > 1 else settled(use) for p, use in found.items()}
        for p, use in found.items():
            batch[p].append(use)
            if self.keeps_gradients:
                made = [merge(batch[p]).materialise() for batch in passes.batches if p in batch]
                each = [(g.movedim(0, -1) * groups.shares(self._share, g)).movedim(-1, 0) for g in made]
                p.grad_sample = each[0] if len(each) == 1 else each  # type: ignore[attr-defined]
        passes.kept.add(found.values())

    @property
    def _share(self) -> float:
        """Of each pass and augmentation in the average that is the gradient of an example, or of a person's row."""
        return 1.0 / (self.samples * self.augmentations)

    # ---- the source of clipped sums

    @torch.no_grad()
    def clipped_sums(self, params: Sequence[Tensor], clipping: Clipping) -> list[Tensor]:
        """Σ_i ḡ_i of the passes just made, by parameter, in double. A second call without a new pass is an error."""
        if self._passes.sums is not None:
            made, self._passes.sums, self._passes.taken = self._passes.sums, None, True
            return [total.view(p.shape) for total, p in zip(made, params, strict=True)]
        sums: list[Any] = [None] * len(params)
        with surroundings(capturing=capturing()):
            for batch in self._take(params):
                for members, total in self._sums_of_blocks(batch, params, clipping):
                    for i, part in zip(members, split(total, [params[i].shape for i in members]), strict=True):
                        part = part if self._scatter is None else self._scatter(params[i], part)
                        sums[i] = part if sums[i] is None else sums[i] + part
        self.pool.take_back()
        return sums

    @torch.no_grad()
    def clipped_row(self, params: Sequence[Tensor], clipping: Clipping) -> Tensor:
        """The same sums of one batch one after the other, as a program wants them. What lies side by side in a block and in
        the row is moved there together: a compiler launches a copy for each part of a row."""
        pieces: dict[int, Tensor] = {}
        (batch,) = self._take(params)
        for members, total in self._sums_of_blocks(batch, params, clipping):
            runs = neighbours(members)
            sizes = [sum(params[i].numel() for i in run) for run in runs]
            pieces |= {run[0]: part for run, part in zip(runs, total.flatten().split(sizes), strict=True)}
        self.pool.take_back()
        return torch.cat([pieces[first] for first in sorted(pieces)])

    def hand_in(self, sums: Sequence[Tensor]) -> None:
        """Clipped sums that a program of this book-keeper's making has computed, in the order of the optimizer's parameters."""
        self._passes.sums = list(sums)

    def rename(self, p: Tensor, other: Tensor) -> None:
        """Uses of p count as uses of the other: another θ-sample of the same parameter."""
        for batch in self._passes.batches:
            if p is not other and p in batch:
                batch[other] += batch.pop(p)

    def _take(self, params: Sequence[Tensor]) -> list[Batch]:
        """The uses of every batch, once."""
        self._check(params)
        self._passes.kept.check()
        batches = self._passes.batches
        self._passes.batches, self._passes.kept, self._passes.taken = [defaultdict(list)], Kept(), True
        return batches

    def norms_and_sums(self, params: Sequence[Tensor], weights: Tensor) -> tuple[Tensor, list[Tensor]]:
        """‖g_i‖² of every example, and Σ_i c_i g_i by parameter for the given c, of the passes just made."""
        (batch,) = self._take(params)
        squares, sums = weights.new_zeros(len(weights)), []
        for p in params:
            if p in batch:
                use = merge(batch[p])
                squares = squares + use.squared_norm().to(squares)
                sums.append(use.weighted_sum(weights * self._share).reshape(p.shape))
            else:
                sums.append(torch.zeros_like(p))
        self.pool.take_back()
        return squares * self._share**2, sums

    def _sums_of_blocks(
        self, batch: Batch, params: Sequence[Tensor], clipping: Clipping
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Which parameters are summed as one, by their place, and their sum: of several, one after the other."""
        uses = [merge(own) if (own := batch.pop(p, None)) else None for p in params]
        batch.clear()
        # Sharded, every rank must scatter in one order, whatever its batch.
        blocks = in_blocks(params, uses, joint=clipping.joint and self._scatter is None)
        del uses  # what was put side by side need not be kept twice
        found = iter(squared_norms([use for _, use in blocks if use is not None]))
        norms = [None if use is None else next(found) for _, use in blocks]
        known = next(n for n in norms if n is not None)
        table = torch.stack([torch.zeros_like(known) if n is None else n for n in norms]).double()
        share = self._groups.shares(self._share, table) if self._groups.divisors else self._share
        factors = clip_factors(clipping, table.clamp_(min=0.0).sqrt_() * share)
        if self.doubt is not None:
            factors = factors.masked_fill(self.doubt, 0.0)
        dropped, recording = dropped_examples(factors), capturing()
        weights = (factors * share).to(dtype_of_sums(blocks))
        for c in weights.unbind():
            members, use = blocks.pop(0)  # and its operands' memory is free for the next sum
            if use is None:
                (i,) = members
                yield members, torch.zeros(params[i].shape, dtype=torch.float64, device=params[i].device)
                continue
            # While recording, sums over materialised gradients pass over dropped rows by themselves.
            if dropped is not None and not (recording and isinstance(use, Dense)):
                use = use.without(dropped)
            yield members, use.weighted_sum(c)

    def _check(self, params: Sequence[Tensor]) -> None:
        if self._passes.second:
            raise PrivacyError(_SECOND_PASS)
        if not any(self._passes.batches) or (self._passes.taken and self.accumulates):
            raise PrivacyError(
                "step() without per-example gradients: gradients were cleared or never computed. Run forward through the "
                "model that make_private returned, then loss.backward(), then step(), then zero_grad()."
            )
        for p in params:
            if p.grad is not None:
                name = next((n for n, own in self.module.named_parameters() if own is p), "")
                raise Unattributed(
                    f"Parameter {name!r} of shape {tuple(p.shape)} was used outside its layer's forward, where it cannot be "
                    "clipped. Use it through its layer only; for an l2 penalty use the optimizer's weight_decay.",
                    self.named(self.module.get_submodule(name.rpartition(".")[0])),
                    outside=True,
                )

    def between_samples(self) -> None:
        """One of several passes over the same examples is complete, or about to start."""
        self._passes.arrived, self._passes.recorded = False, None

    def batches(self) -> int:
        """How many batches the pending gradients come from."""
        return len(self._passes.batches)

    def clear(self) -> None:
        """Forget all pending gradients, also of parameters that were frozen since."""
        self._passes = _Passes()
        self.pool.take_back()
        if self.keeps_gradients:
            for p in self.module.parameters():
                p.grad_sample = None  # type: ignore[attr-defined]

    def forget_passes(self) -> None:
        """Forget half-finished forward and backward passes, which the next one must not inherit."""
        self._generation += 1
