"""Bugs of the recorded program of ``engine.compile``: of what it draws, reads and writes, and of when it is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from sowing import Patch, attr, both
from torch import Tensor

import dpivon.privacy.kernels.padded as padded
import dpivon.privacy.kernels.padded_step as padded_step
import dpivon.privacy.kernels.whole_step as whole_step
from dpivon.audit.session import PATHS
from dpivon.optim.rows import _Group
from dpivon.privacy.clipping import Clipping
from dpivon.privacy.compiled import CompiledStep
from dpivon.privacy.kernels.padded_step import PaddedStep
from dpivon.privacy.kernels.whole_step import WholeStep
from dpivon.privacy.layers.groups import Groups


def numbers(change: Callable[[Any, Any, float, float], tuple[float, float]]) -> Patch:
    """``change(self, spec, σC, b)`` in place of the numbers that the program of a release reads."""

    def launch(original: Any) -> Any:
        def launched(self: Any, spec: Any) -> Any:
            write = self._numbers.write
            self._numbers.write = lambda values: write(change(self, spec, *values))
            try:
                return original(self, spec)
            finally:
                del self._numbers.write

        return launched

    return attr(WholeStep, "__call__", launch)


def normals(change: Callable[[Callable[[Tensor], Tensor], Any, Tensor], Tensor]) -> Patch:
    """``change(original, self, like)`` in place of the standard normals that a program draws, parameter by parameter."""

    def draw(original: Any) -> Any:
        return lambda self, like: change(lambda other: original(self, other), self, like)

    return attr(WholeStep, "_standard_normal", draw)


def turn(program: Any) -> int:
    """Of which parameter noise is drawn, by its place."""
    program.turn = (getattr(program, "turn", -1) + 1) % len(program.params)
    return int(program.turn)


def raw_sums(use: Callable[[Any, Any], None]) -> Patch:
    """``use(original, self)`` in place of a program's update; ``self.program.raw`` is the sum before its noise, over b."""

    def stash(original: Any) -> Any:
        def at(self: Any, thetas: Any) -> Any:
            row, loss = original(self, thetas)
            self.raw = (row / 13.0).float()
            return row, loss

        return at

    def learn(original: Any) -> Any:
        return torch.no_grad()(lambda self: use(original, self))

    return both(attr(PaddedStep, "at", stash), attr(WholeStep, "_learn", learn))


def rows_as_examples() -> Patch:
    """Whatever an example is, the program measures and clips its rows."""
    return attr(padded_step, "_summed", lambda original: lambda keeper, each: original(keeper, 1))


def parts(change: Callable[[Any, Any], Any]) -> Patch:
    """``change(self, parts)`` in place of the parts of a batch that is too large for a program: (first, last, part)."""
    return attr(CompiledStep, "_parts", lambda original: lambda self, *a: change(self, original(self, *a)))


# ---- bugs that only a recorded program of the whole release can have


def _only_here(patch: Patch, why: str, **special: Patch | str) -> dict[str, Patch | str]:
    return {path: special.get(path, why) for path in PATHS} | {"compiled": patch}


_UNPADDED = "batches are not padded: every place holds an example"


def spare_places_count() -> dict[str, Patch | str]:
    """The loss of a spare place is not masked."""

    def unmasked(original: Any) -> Any:
        return lambda self, model, batch, spare, counted: original(self, model, batch, spare & False, counted)

    def places(original: Any) -> Any:
        return lambda t, augment: original(t & False if t.dtype == torch.bool else t, augment)

    stacks = attr(padded, "of_every_view", places)
    return _only_here(attr(PaddedStep, "_pass", unmasked), _UNPADDED, captured=stacks)


def spare_rows_count() -> dict[str, Patch | str]:
    """The places that a person has no row for repeat the person's rows, and count as they do."""

    def every(original: Any) -> Any:
        def counted(self: Groups, places: int) -> tuple[Tensor, Tensor]:
            index, counts = original(self, places)
            return index, counts.view(-1, places)[:, :1].expand(-1, places).flatten()

        return counted

    why, stacks = "rows are not padded: a person has those that there are", "a stack draws rows, and takes no ids"
    return _only_here(attr(Groups, "padded", every), why, stacked=stacks, captured=stacks)


def last_batch_stays_seated() -> dict[str, Patch | str]:
    """What a smaller batch leaves in the buffers of the last one keeps its places."""

    def load(original: Any) -> Any:
        def over(self: Any, tensors: Any, generator: Any, people: Any = None) -> None:
            before = [b.clone() for b in self.buffers], self._filled
            original(self, tensors, generator, people)
            most, each = max(before[1], self._filled), self.each
            for buffer, old in zip(self.buffers, before[0], strict=True):
                buffer[self._filled * each : most * each] = old[self._filled * each : most * each]
            self._filled = most
            self.places.copy_(
                torch.arange(self.capacity).masked_fill(torch.arange(self.capacity) >= most, self.capacity)
            )

        return over

    return _only_here(attr(PaddedStep, "load", load), "a batch has tensors of its own, not places in those of the last")


def generator_stands_still() -> dict[str, Patch | str]:
    """Every replay begins where the first one began."""

    def run(original: Any) -> Any:
        def again(self: Any) -> None:
            state = self.generator.get_state()
            original(self)
            self.generator.set_state(state)

        return again

    why = "nothing is replayed: whatever is drawn moves its generator on"
    by_number = "its noise is drawn by the number of the release, and no generator has to move on"
    return _only_here(attr(WholeStep, "_run", run), why, stacked=by_number, captured=by_number)


def generator_kept() -> dict[str, Patch | str]:
    """A program draws from the generator it was made with, also where the run has another by now."""

    def ready(original: Any) -> Any:
        def blind(self: Any, spec: Any) -> bool:
            with mock.patch.object(whole_step, "noise_on", return_value=self.generator):
                return bool(original(self, spec))

        return blind

    why = "it asks the source of noise for every release, and holds no generator of it"
    return _only_here(attr(WholeStep, "ready", ready), why)


def journal_not_asked() -> dict[str, Patch | str]:
    """A program makes the release of a run whose noise has to follow from the sum, which nobody has seen then."""

    def ready(original: Any) -> Any:
        def blind(self: Any, spec: Any) -> bool:
            journal, self.optimizer.journal = self.optimizer.journal, None
            try:
                return bool(original(self, spec))
            finally:
                self.optimizer.journal = journal

        return blind

    return _only_here(attr(WholeStep, "ready", ready), "sums are known before they are noised, in every release")


def theta_of_the_last_step() -> dict[str, Patch | str]:
    """A program computes gradients at the θ that it finds, and then draws the next."""

    def at(original: Any) -> Any:
        def stale(self: Any, thetas: Any) -> Any:
            last = getattr(self, "last", thetas)
            self.last = [[t.clone() for t in theta] for theta in thetas]
            return original(self, last)

        return stale

    engine = "gradients are taken of the parameters themselves, which are θ at that time"
    stacks = "its sums get θ as an argument, which the same step has drawn"
    return _only_here(attr(PaddedStep, "at", at), engine, stacked=stacks, captured=stacks)


def program_of_the_old_bound() -> dict[str, Patch | str]:
    """What a program was recorded for does not include C."""

    def without(key: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(part for part in key if not isinstance(part, Clipping))

    blind = attr(CompiledStep, "_key", lambda original: lambda self, batch: without(original(self, batch)))
    fixed = "C is fixed for the life of a stack"
    return _only_here(blind, "nothing is recorded: every step clips anew", stacked=fixed, captured=fixed)


def update_told_another_variance() -> dict[str, Patch | str]:
    """The captured update corrects for less noise than the release states."""
    less = attr(_Group, "write", lambda original: lambda self, b, variance: original(self, b, variance / 4))
    return _only_here(less, "an update reads the variance of the release itself: see 'correction of nothing'")
