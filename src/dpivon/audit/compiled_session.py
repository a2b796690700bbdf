"""One run of ``engine.compile``, whose program is recorded on a CPU as a GPU captures it: watched where it draws its noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dpivon.audit.engine_session import EngineSession
from dpivon.audit.session import Answer, Observed, Setting, Subject
from dpivon.privacy.engine import PrivacyEngine
from dpivon.privacy.kernels.whole_step import WholeStep


class CompiledSession(EngineSession):
    """The whole release is one program where the method allows it, else the clipped sum is."""

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
        self.optimizer.noise = self._own
        batch = self._taken([0])
        self.compiled._tried.add(key := self.compiled._key(batch))
        self.program = self.compiled._program(key, batch)
        self.program._recorded = self.program._record()
        self.whole = self.compiled._whole(self.program)
        if self.whole is None:
            super().watch_noise()
        else:
            self._watch(self.whole)

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
        kept = step.capacity, step._programs
        step.capacity, step._programs = max(1, -(-len(rows) // 3)), {}
        super().watch_noise()
        try:
            seen = self._step(*self._batch(rows))
        finally:
            (step.capacity, step._programs), self.optimizer.noise = kept, self._own
        return [] if self.optimizer.last_release is before else [seen]

    def rebound(self, bound: float) -> bool:
        super().rebound(bound)
        self._prepare()
        return True

    def leave_half_way(self, rows: Sequence[int]) -> bool:
        return False

    def _step(self, x: Tensor, y: Tensor) -> Observed:
        torch.manual_seed(self.setting.seed + 1000 + self._t)
        self._t += 1
        mean, self._theta = self._trained(), []
        with self.subject.around_a_step():
            self.compiled((x, y))
        drawn = [] if self.whole is None else self.whole._thetas[-1:]
        theta = self._theta or [t.clone() for t in (drawn[0] if drawn else mean)]
        return self._observed(theta, len(self.program.thetas))
