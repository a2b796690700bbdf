"""One call per batch of the user's own loop: θ-sample, forward, backward, clipping, noise and update.

On a CPU it is the eager step; images go through convolutions with their channels last, 32 at a time, which is faster and takes
half the memory. On a GPU a Poisson batch is padded to a fixed capacity, and forward, backward, norms and the
clipped sum of a padded batch are one program: recorded from the eager book-keeping, compiled, and replayed as a CUDA graph.
So are the noise and the update where they can be; every replay draws on from where the optimizer's generator stands.

A batch larger than the capacity runs in parts of the same release. Every example gets a place in the padded batch that is drawn
uniformly, since a GPU may round a row otherwise at another place: where an example is missing no other one moves. A spare row
holds zeros, and its loss is masked, so it contributes exactly zero.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.errors import PrivacyError, bad, check_whole
from dpivon.optim.ivon import IVON
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.gradients.model_io import map_tensors, others_in, rows_in, structure, tensors_in
from dpivon.privacy.kernels.constants import ReadsValues, as_compiled
from dpivon.privacy.kernels.padded import convolves, laid_out
from dpivon.privacy.kernels.padded_step import PaddedStep
from dpivon.privacy.kernels.whole_step import WholeStep, whole_step
from dpivon.privacy.noise import os_generator
from dpivon.privacy.optimizer import DPOptimizer
from dpivon.privacy.people import People, ends_of_parts, rows_of_people, shows_order
from dpivon.privacy.precision import without_autocast
from dpivon.privacy.stack import room

_MOST_PROGRAMS = 8  # of one step: each is compiled for minutes, so batches of ever new shapes run eagerly
_IMAGES = 32  # go through a CPU at a time, unless a number is given
_ALONE = "a layer without a rule runs example by example"
LossFn = Callable[[nn.Module, Any], Tensor]


class CompiledStep:
    """Makes one private step per batch. Made by :meth:`dpivon.PrivacyEngine.compile`.

    Attributes:
        path: ``"captured"``, or ``"eager"`` with the reason.
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        model: nn.Module,
        loss_fn: LossFn,
        check: Callable[[Any], None] | None,
        *,
        capacity: int,
        most: int | None,
        capture: bool | None,
        people: People | None = None,
    ) -> None:
        self.optimizer, self.model, self.loss_fn = optimizer, model, loss_fn
        self.keeper: BookKeeper = optimizer.source
        self.device, self.samples = optimizer.params[0].device, self.keeper.samples
        fix = "Use what fits in memory, such as 64"
        self._most = None if most is None else check_whole("max_physical_batch_size", most, fix, at_least=1)
        self._check = self._due = check  # the latter before the next eager pass
        self._compiles = False  # whether the model is told that torch compiles it, since else it reads values
        self._people = people
        self._several = 1 if people is None else people.rows or 1  # rows of a person at most, where that is fixed
        self.capacity = capacity if self._most is None else min(capacity, max(1, self._most // self._several))
        self._tried: set[Any] = set()  # kinds of batches and states of the model that ran eagerly, under all checks
        self._images: bool | None = None  # whether batches are images for convolutions on a CPU; None before the first
        self._programs: dict[Any, PaddedStep] = {}
        self._places = os_generator()  # who sits where in a padded batch, and in which part of a large one
        wanted = self.device.type == "cuda" if capture is None else capture
        self._reason = None if wanted else f"on {self.device.type}" if capture is None else "capture=False"
        if wanted and (reason := self._obstacle()) is not None:
            self._give_up(reason)

    @property
    def path(self) -> str:
        return "captured" if self._reason is None else f"eager ({self._reason})"

    def __call__(self, batch: Any) -> Tensor:
        """One step. Returns the mean loss of the batch, which is computed from private data and not released: do not publish
        it, nor decide anything by it."""
        optimizer, draws = self.optimizer, self.optimizer.draws
        rows = rows_in(batch, 0)
        self._make_sure(batch)
        if self._images is None:
            self._images = self.device.type == "cpu" and convolves(self.model, tensors_in(batch))
        key = self._key(batch) if self._reason is None else None
        program = self._program(key, batch) if key in self._tried else None
        whole = None if program is None or self._examples(rows) > self.capacity else self._whole(program)
        if whole is not None:
            self._load(whole.program, batch)
            optimizer.step_by(whole)
            return whole.loss / max(1, rows)
        total: Tensor | None = None
        looked = self._people is None or shows_order(rows, self._examples(rows))
        redeemable = draws is not None and draws.redeemable
        for first, last, part in self._parts(batch, rows, program):
            optimizer.begin_micro_batch(first=first, last=last)
            if draws is not None:
                draws.redeemable = redeemable  # a batch that was released before stays released
            optimizer.zero_grad()
            ready = self._programs.get(key)  # None also if it failed in an earlier part
            loss = self._eager(part) if program is None or ready is None else self._padded(ready, part)
            optimizer.step()
            total = loss if total is None else total + loss
        assert total is not None
        if program is None and key is not None and rows > 0 and looked:
            self._note_tried(key, batch)
        return total / max(1, rows)

    def _note_tried(self, key: Any, batch: Any) -> None:
        """A batch was run eagerly, under all checks: those like it may be captured."""
        self._tried.add(key)
        if self._key(batch) != key:
            self._give_up("its forward changes attributes of the model")
        elif self.keeper.ran_alone:
            self._give_up(_ALONE)
        elif len(self._tried) > _MOST_PROGRAMS:
            self._give_up(f"batches, model or settings have had more than {_MOST_PROGRAMS} different forms")

    # ---- the eager step

    def _make_sure(self, batch: Any) -> None:
        """Try the loss on made-up numbers, if that is due."""
        if self._due is not None:
            with as_compiled(self._compiles):
                self._due(batch if rows_in(batch, 0) else None)
        self._due = None

    def _eager(self, batch: Any) -> Tensor:
        self._make_sure(batch)
        try:
            return self._made_eagerly(batch)
        except RuntimeError as error:
            if not self._images or "view size is not compatible" not in str(error):
                raise
            self._images = False  # a network that calls `view` on its images needs them as they are
            self.optimizer.zero_grad()
            return self._made_eagerly(batch)

    def _made_eagerly(self, batch: Any) -> Tensor:
        last = bool(self._images)
        batch = map_tensors(lambda t: laid_out(t.to(self.device, non_blocking=True), last), batch)
        total = torch.zeros((), device=self.device)
        for _ in range(self.samples):
            with as_compiled(self._compiles), torch.enable_grad(), self._sample():
                losses = self._losses(batch)
                with without_autocast(self.device.type):
                    mean = self.keeper.loss_reduction == "mean" and len(losses) > 0
                    (losses.mean() if mean else losses.sum()).backward()
            total += losses.detach().float().sum()
        return total / self.samples

    def _sample(self) -> AbstractContextManager[None]:
        inner = self.optimizer.original_optimizer
        return self.optimizer.sampled_params(train=True) if isinstance(inner, IVON) else nullcontext()

    def _losses(self, batch: Any) -> Tensor:
        losses: Any = self.loss_fn(self.model, batch)
        rows = rows_in(batch, 0)
        if not isinstance(losses, Tensor) or losses.shape != (rows,):
            found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            name = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)
            raise bad(
                "loss_fn", name, f"returned {found} for {rows} rows", "Return one loss per row (reduction='none')"
            )
        return losses

    # ---- parts of a batch

    def _parts(self, batch: Any, rows: int, program: PaddedStep | None) -> Iterator[tuple[bool, bool, Any]]:
        """(first, last, part): the batch itself if it fits. A person is in one part, whole."""
        views, draws, examples = self.keeper.augmentations, self.optimizer.draws, self._examples(rows)
        size = self._most if program is None else self.capacity
        if size is None and self._images and not self.optimizer.together.sharded:
            size = max(1, _IMAGES // views)
        if size is None or (examples if program is not None else rows // views) <= size:
            yield True, True, batch
            return
        if self.optimizer.together.sharded:
            raise bad("max_physical_batch_size", size, "but the model is sharded", "Use dpivon.BatchMemoryManager")
        order, ends = torch.arange(examples), list(range(size, examples, size))
        people = None if draws is None or self._people is None else draws.sizes
        if program is not None:
            order = order[torch.randperm(examples, generator=self._places)]
        elif people is not None:
            ends = ends_of_parts(people, size)
        try:
            for i, part in enumerate(order.tensor_split(ends)):
                if draws is not None and people is not None:
                    draws.sizes = tuple(people[k] for k in part.tolist())
                    part = rows_of_people(people, part)
                yield i == 0, i == len(ends), _some(batch, part, views)
        finally:
            if draws is not None and draws.redeemable:
                draws.sizes = people

    def halve(self) -> None:
        """From here on run half as many examples at once: after an error for want of memory the same batch may come again."""
        size = self.capacity * self._several if self._most is None else self._most
        if size == 1:
            raise bad("max_physical_batch_size", 1, "not even one example fits", "Use a smaller model")
        self._most, self.capacity = size // 2, max(1, size // 2 // self._several)
        self._programs.clear()

    # ---- the captured step

    def _obstacle(self) -> str | None:
        """What is known before the first batch to be no fixed program."""
        keeper, together = self.keeper, self.optimizer.together
        if together.world > 1 or together.sharded:
            return "several ranks train together"
        if self._people is not None and self._people.rows is None:
            return "rows_per_user=None gives every person another number of rows"
        if keeper.keeps_gradients:
            return "grad_sample_mode leaves per-example gradients"
        if not keeper.batch_first:
            return "batch_first=False"
        if keeper.ran_alone:
            return _ALONE
        if any("_orig_mod" in layer._modules for layer in keeper.module.modules()):
            return "torch.compile was called on the model, so it is not recorded: give make_private the model itself"
        return None

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        self._tell(False)
        message = f"engine.compile: the step is not captured, since {reason}. It runs eagerly, with the same result."
        warnings.warn(message, stacklevel=4)

    def _tell(self, compiles: bool) -> None:
        """Tell the model whether torch compiles it. Changed, it is another model: all checks are made again."""
        self._programs.clear()
        if compiles != self._compiles:
            self._compiles, self._due = compiles, self._check
            self.keeper._known.clear()

    def _program(self, key: Any, batch: Any) -> PaddedStep:
        """The program for batches like this one."""
        if key not in self._programs:
            parts = self.optimizer.params, self.optimizer._clipping, batch, self.capacity
            each = self.keeper.augmentations * self._several
            self._programs[key] = PaddedStep(self.keeper, self.model, self._losses, *parts, each, self._compiles)
        return self._programs[key]

    def _key(self, batch: Any) -> Any:
        """All that is fixed in a program; None if batches like this one have none."""
        tensors, reason = tensors_in(batch), ""
        if other := next((type(o).__name__ for o in others_in(batch) if o is not None), None):
            reason = f"a batch holds a {other}, which is no tensor"
        elif len({len(t) if t.dim() else -1 for t in tensors}) != 1:
            reason = "the tensors of a batch do not have one row per example each"
        if reason:
            self._give_up(reason)
            return None
        kind = self.device.type
        numbers, held = self._looked_at
        return (
            structure(batch),
            tuple((t.shape[1:], t.dtype) for t in tensors),
            tuple(own.get(key) for own, key in numbers),
            tuple((t.data_ptr(), t.requires_grad) for own, key in held if (t := own[key]) is not None),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            self.optimizer._clipping,
            self._compiles,
        )

    @cached_property
    def _looked_at(self) -> tuple[list[tuple[dict[str, Any], str]], list[tuple[dict[str, Any], str]]]:
        """Where the layers keep numbers (their mode, a dropout rate) and tensors: found once, since every step looks."""
        layers = list(self.keeper.module.modules())
        numbers = [
            (vars(at), key) for at in layers for key, value in vars(at).items() if isinstance(value, int | float)
        ]
        held = [(own, key) for at in layers for own in (at._parameters, at._buffers) for key in own]
        return numbers, held

    def _whole(self, program: PaddedStep) -> WholeStep | None:
        """The program of the whole release on a batch of this kind, if there is one and it can make the next release."""
        try:
            if program.whole is None and program.settled:
                program.whole = whole_step(program, self.optimizer) or False
            whole: WholeStep | None = program.whole or None
            if whole is None or not whole.ready(self.optimizer.spec_of_release()):
                return None
            whole.prepare()
        except Exception as error:
            program.whole = False
            what = f"engine.compile: noise and update are not captured ({_line(error)})."
            warnings.warn(f"{what} They run eagerly, with the same result.", stacklevel=4)
            return None
        return whole

    def _examples(self, rows: int) -> int:
        """How many examples a batch of so many rows holds: people, where they are drawn."""
        draws = self.optimizer.draws
        people = None if self._people is None or draws is None else draws.sizes
        return rows // self.keeper.augmentations if people is None else len(people)

    def _load(self, program: PaddedStep, part: Any) -> None:
        rows, of_people, draws = rows_in(part, 0), self.keeper.people, self.optimizer.draws
        people = None
        if of_people is not None and draws is not None and rows:
            itself = all(a is b for a, b in zip(tensors_in(part), tensors_in(draws.batch), strict=False))
            people = of_people(rows, None if itself else part)  # whose order needs no look if it is the loader's
        program.load(tensors_in(part), self._places, people)

    def _padded(self, program: PaddedStep, part: Any) -> Tensor:
        """The clipped sum of a part, for the optimizer to take; by an eager pass if that fails before it was captured."""
        self._load(program, part)
        try:
            program.record()
            for k in range(self.samples):
                with self._sample():
                    program.note_theta(k)
                    if k == self.samples - 1:
                        row, loss = program()
                        self.keeper.hand_in(row.split_with_sizes(program.sizes))
            return loss
        except Exception as error:
            if program.captured:
                raise
            self.optimizer.zero_grad()
            if isinstance(error, ReadsValues) and self._check is not None and not self._compiles:
                self._tell(True)
                try:
                    return self._eager(part)
                except PrivacyError as refused:
                    error = refused  # as it is the model has passed all checks
                    self.optimizer.zero_grad()
            self._give_up(_line(error))
            return self._eager(part)


class Compiles:
    """What :class:`dpivon.PrivacyEngine` is made on: the step of the last ``make_private`` as one function."""

    _dataset: Any
    _last: tuple[Any, DPOptimizer] | None = None  # the model, as the caller uses it, and the optimizer

    def check(self, loss_fn: Callable[..., Any], batch: Any = None) -> None:
        raise NotImplementedError

    def compile(
        self, loss_fn: LossFn, *, max_physical_batch_size: int | None = None, capture: bool | None = None
    ) -> CompiledStep:
        """The whole private step as one function of a batch, after ``make_private``; on a GPU captured as a CUDA graph.

        >>> step = engine.compile(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"))
        >>> for batch in loader:
        ...     loss = step(batch)

        It does what the eager loop does: θ-samples, forward, backward, clipping, the charge, noise and the update, with the
        same schedulers, checkpoints and accounts. What cannot be captured runs eagerly, and a warning says why.

        Args:
            loss_fn: ``loss_fn(model, batch)`` returns one loss per row; it is tried on made-up numbers, as
                :meth:`dpivon.PrivacyEngine.check` does. What it reads besides the model and the batch is fixed when the step
                is captured. Use autocast inside for bf16.
            max_physical_batch_size: how many examples run at once; a larger batch runs in parts of one release. By default all,
                but on a CPU 32 images of 16 × 16 or more.
            capture: False for the eager step also on a GPU; True records the program also on a CPU, where it is not faster.
        """
        if self._last is None:
            raise PrivacyError("compile() before make_private: there is no private model yet. Call it after.")
        if not callable(loss_fn):
            raise bad("loss_fn", loss_fn, "is not a function", "Give loss_fn(model, batch) -> one loss per row")
        model, optimizer = self._last
        spec, draws = optimizer.spec, optimizer.draws
        people = getattr(None if draws is None else draws.sampler(), "people", None)
        n = len(self._dataset if people is None else people)
        return CompiledStep(
            optimizer,
            model,
            loss_fn,
            None if spec.unchecked else lambda batch: self.check(loss_fn, batch),
            capacity=min(n, room(spec.sample_rate * n)) if spec.poisson else math.ceil(spec.expected_batch_size),
            most=max_physical_batch_size,
            capture=capture,
            people=people,
        )


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _some(batch: Any, examples: Tensor, each: int) -> Any:
    """These examples of a batch, each of so many rows."""
    index = examples if each == 1 else (examples.unsqueeze(1) * each + torch.arange(each)).flatten()
    return map_tensors(lambda t: t[index.to(t.device)] if t.dim() else t, batch)
