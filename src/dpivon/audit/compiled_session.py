"""One run of ``engine.compile``, whose program is recorded on a CPU as a GPU captures it: watched where it draws its noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from dpivon.audit.engine_session import EngineSession
from dpivon.audit.session import Answer, Observed, Setting, Subject
from dpivon.errors import PrivacyError
from dpivon.optim.rows import StateRows
from dpivon.privacy.engine import PrivacyEngine
from dpivon.privacy.kernels.padded_step import NotCaptured, PaddedStep
from dpivon.privacy.kernels.whole_step import WholeStep
from dpivon.privacy.precision import full_precision, without_autocast


class _LeftError(Exception):
    """A batch is left half-way."""


class CompiledSession(EngineSession):
    """The whole release is one program where the method allows it, else the clipped sum is. Without a record all is eager."""

    program: PaddedStep | None = None

    def __init__(
        self, subject: Subject, setting: Setting, answer: Answer | None, engine: PrivacyEngine | None = None
    ) -> None:
        super().__init__(subject, setting, answer, engine)
        self.compiled = step = self.engine.compile(
            lambda model, batch: subject.loss(model(batch[0]), batch[1]), capture=True
        )
        step.capacity = len(subject.inputs)
        step._places.manual_seed(setting.seed)  # two worlds seat everyone alike
        step._check, self.optimizer.loss_checked = None, True
        self._own, self._theta, sample = self.optimizer.noise, list[Tensor](), step._sample

        @contextmanager
        def watched() -> Iterator[None]:
            with sample():
                self._theta = self._trained()
                yield

        step._sample = watched  # type: ignore[method-assign]
        self._prepare()

    def _trained(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.module.parameters() if p.requires_grad]

    def _prepare(self) -> None:
        """Record the program, not from a batch: the first step is a replay as the others."""
        self.optimizer.noise, self.program = self._own, None
        batch = self._taken([0])
        with self.subject.around_a_step(), suppress(NotCaptured):
            if self.compiled._reason is None:
                self._record(self.compiled._key(batch), batch)
        if self.whole is None:
            super().watch_noise()
        else:
            self._watch(self.whole)

    def _record(self, key: Any, batch: Any) -> None:
        program = self.compiled._program(key, batch)
        if program._recorded is None:
            with full_precision(), without_autocast(program.device.type):
                program._recorded = program._record()
        self.compiled._whole(program)
        self.compiled._tried.add(key)
        self.program = program

    @property
    def whole(self) -> WholeStep | None:
        """The program of a whole release, where the method allows it."""
        return None if self.program is None else self.program.whole or None

    def watch_noise(self) -> None:
        """A program draws from the generator itself."""

    def standard_normal(self, like: Tensor) -> Tensor:
        return self._normal(like) if self.whole is not None else super().standard_normal(like)

    def _watch(self, whole: WholeStep) -> None:
        own = self._normal = whole._standard_normal

        def normal(like: Tensor) -> Tensor:
            self.charged.append(len(self.accountant()))
            if self.answer is None:
                return own(like)
            std = self.optimizer.spec_of_release().noise_std
            return self.answer(like, std) / std

        whole._standard_normal = normal  # type: ignore[method-assign]

    def step_in_parts(self, rows: Sequence[int]) -> list[Observed]:
        next(iter(self.loader))
        step, before = self.compiled, self.optimizer.last_release
        kept = step.capacity, step._most, step._programs, self.optimizer.noise
        self._have_room_for(len(rows))
        try:
            seen = self._step(*self._batch(rows))
        finally:
            step.capacity, step._most, step._programs, self.optimizer.noise = kept
        return [] if self.optimizer.last_release is before else [seen]

    @contextmanager
    def noted(self, found: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """The program is made anew, as after a resume, and draws from the generator that the run has by then."""
        own = WholeStep._standard_normal
        if self.program is not None:
            self.program.whole = None

        def normal(whole: WholeStep, like: Tensor) -> Tensor:
            noise = own(whole, like)
            found.append((like.flatten().clone(), noise.flatten()))
            return noise

        WholeStep._standard_normal = normal  # type: ignore[method-assign, assignment]
        try:
            with super().noted(found):
                yield
        finally:
            WholeStep._standard_normal = own  # type: ignore[method-assign]

    def _have_room_for(self, examples: int) -> None:
        """A third of so many: a larger batch is summed in parts, and its noise is drawn eagerly."""
        self.compiled.capacity = self.compiled._most = max(1, -(-examples // 3))
        self.compiled._programs = {}
        self.optimizer.noise = self._own
        super().watch_noise()

    def leave_half_way(self, rows: Sequence[int]) -> bool:
        """The second part of a batch fails; the next batch is summed in parts too, where the first would be added to it."""
        next(iter(self.loader))
        begin = self.optimizer.begin_micro_batch

        def fail(*, first: bool, last: bool) -> None:
            if not first:
                raise _LeftError
            begin(first=first, last=last)

        self._have_room_for(len(rows))
        self.optimizer.begin_micro_batch = fail
        try:
            self._step(*self._batch(rows))
        except _LeftError:
            return True
        finally:
            self.optimizer.begin_micro_batch = begin
        raise PrivacyError(f"A batch of {len(rows)} was not summed in parts.")

    def rebound(self, bound: float) -> bool:
        super().rebound(bound)
        self._prepare()
        return True

    def _step(self, x: Tensor, y: Tensor) -> Observed:
        torch.manual_seed(self.setting.seed + 1000 + self._t)
        self._t += 1
        mean, self._theta = self._trained(), []
        with self.subject.around_a_step():
            self.compiled((x, y))
        drawn = [] if self.whole is None else self.whole._thetas[-1:]
        theta = self._theta or [t.clone() for t in (drawn[0] if drawn else mean)]
        seen = self._observed(theta, self.compiled.samples)
        if not self._theta and self.whole is not None and self.whole.rows is not None:
            self._check_told(self.whole.rows, seen)
        return seen

    def _check_told(self, rows: StateRows, seen: Observed) -> None:
        """The captured update reads the variance from the device's memory, not from the release."""
        told = {float(group.hyper["noise_variance"]) for group in rows.groups}
        if told != {seen.variance}:
            raise PrivacyError(f"The release states the variance {seen.variance}, and its update was told {told}.")
