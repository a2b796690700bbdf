"""Runs of a stack, watched at their streams and at what the update rules get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.audit.session import Answer, Observed, Session, Setting, Subject
from dpivon.errors import PrivacyError
from dpivon.privacy.accounting import Accountant
from dpivon.privacy.augmentation import Augmentation
from dpivon.privacy.clipping import FLAT, Clipping
from dpivon.privacy.kernels.padded import PaddedGradients
from dpivon.privacy.mechanism import NoiseSpec
from dpivon.privacy.stack import StackedGradients
from dpivon.privacy.streams import PRIVACY
from dpivon.stacked.networks import AnyNetwork
from dpivon.stacked.run import Run
from dpivon.stacked.stack import Stack


class TracedNetwork(AnyNetwork):
    """Any network as the one fixed program that a GPU captures, on a CPU too."""

    def gradients(
        self,
        runs: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        augment: Augmentation | None = None,
        clipping: Clipping = FLAT,
    ) -> StackedGradients:
        return PaddedGradients(self, device, dtype, augment, clipping)


class _WatchedStreams:
    """The stack's own streams; batches and noise may be the auditor's."""

    def __init__(self, session: StackSession, own: Any) -> None:
        self.session, self.own = session, own
        self.forced: Tensor | None = None  # [K, N], who is in the next batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def normal(self, out: Tensor, step: Tensor, stream: int) -> Tensor:
        session = self.session
        if stream == PRIVACY:
            session.charged.append(len(session.accountant()))
        if stream != PRIVACY or session.answer is None:
            return self.own.normal(out, step, stream)
        for row, std in zip(out, session.stack.mechanism.noise_std.flatten().tolist(), strict=True):
            row.copy_(session.answer(row, std) / std)
        return out

    def poisson(self, examples: int, rates: Tensor, first_step: int, steps: int) -> Tensor:
        if self.forced is None:
            return self.own.poisson(examples, rates, first_step, steps)
        return self.forced.expand(steps, *self.forced.shape).to(torch.int8)


class StackSession(Session):
    def __init__(self, subject: Subject, setting: Setting, answer: Answer | None) -> None:
        super().__init__(subject, setting, answer)
        kind = TracedNetwork if subject.path == "captured" else AnyNetwork
        self.network = kind(subject.build, subject.loss)
        runs = [
            Run(
                str(subject.method),
                seed=1000 + setting.seed + (0 if setting.twins else k),
                noise_multiplier=setting.sigma * (1 + k if setting.ladder else 1),
                max_grad_norm=setting.bound,
                lr=setting.lr or 0.01,
                batch_size=int(setting.batch),
            )
            for k in range(setting.runs)
        ]
        first = self.network.pack(subject.model)
        self.stack = Stack(
            runs,
            self.network,
            subject.inputs,
            subject.labels,
            start=first.expand(len(runs), -1),
            dataset_size=setting.size,
            block=1,
            augment=Augmentation(subject.views) if subject.views > 1 else None,
        )
        stack: Any = self.stack
        self.streams = _WatchedStreams(self, stack.streams)
        stack.streams = stack.mechanism.streams = stack.sampler.streams = self.streams
        self._released: list[Tensor] = []
        self._thetas: list[Tensor] = []
        theta, apply = stack._theta, stack._apply

        def watched_theta() -> Tensor:
            self._thetas.append(theta().clone())
            return self._thetas[-1]

        def watched_apply(g: Tensor, *rest: Any) -> Any:
            self._released.append(g.detach().double().clone())
            return apply(g, *rest)

        stack._theta, stack._apply = watched_theta, watched_apply

    # ---- steps

    def step(self, rows: Sequence[int]) -> Observed:
        seen = self.step_in_parts(rows)
        if not seen:
            raise PrivacyError(f"A step on a batch of {len(rows)} released nothing.")
        return seen[-1]

    def all_runs(self, mask: Tensor) -> Tensor:
        """One step with run k on the rows of mask[k]; what every run released, [K, P]."""
        self._released.clear()
        self._thetas.clear()
        self.streams.forced = mask
        self.train(1)
        self.streams.forced = None
        return self._released[-1] if self._released else torch.zeros(0)

    def step_in_parts(self, rows: Sequence[int]) -> list[Observed]:
        mask = torch.zeros(self.setting.runs, len(self.subject.inputs))
        mask[:, list(rows)] = 1
        stated = float(
            self.stack.parts[0].hyper["noise_variance"][0]
        )  # to the first run's rule, of the release to come
        self.all_runs(mask)
        shapes = [p.shape for p in self.subject.trained()]
        seen = []
        for g in self._released:
            pieces = self._thetas[-1][0].split([s.numel() for s in shapes])
            theta = [t.view(s) for t, s in zip(pieces, shapes, strict=True)]
            seen.append(Observed(g[0], stated, theta, len(self._thetas)))
        return seen

    def train(self, steps: int) -> None:
        with self.subject.around_a_step():
            for _ in self.stack.train(steps):
                pass

    # ---- what is stated and kept

    def spec(self) -> NoiseSpec:
        return self.stack.mechanism.specs[0]

    def accountant(self) -> Accountant:
        return self.stack.mechanism.accountants[0]

    def sampled(self, steps: int) -> list[list[int]]:
        block = self.stack.sampler.draw(0, steps)
        out = []
        for t in range(steps):
            parts = [(p[0], p[2]) for p in block.overflows.get(t, [])] or [(block.index[t], block.start[t])]
            out.append([int(i) for index, start in parts for i in index[int(start[0]) : int(start[1])]])
        return out

    def state(self) -> list[Tensor]:
        kept = [value.detach() for part in self.stack.parts for _, value in sorted(part.state.items())]
        return [*kept, self.stack.mean, self.stack.std]

    def network_as_trained(self) -> nn.Module:
        return self.subject.build()

    def means(self) -> Tensor:
        return self.stack.mean[0].detach().double()
