"""One run under ``PrivacyEngine``, watched at its noise source and at its release."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpivon.audit.ruleless import without_rules
from dpivon.audit.session import Answer, Observed
from dpivon.audit.subject import Setting, Subject
from dpivon.errors import PrivacyError
from dpivon.methods import describe, method
from dpivon.optim.ivon import IVON
from dpivon.privacy.accounting import Accountant
from dpivon.privacy.engine import PrivacyEngine
from dpivon.privacy.losses import PerExampleLoss
from dpivon.privacy.mechanism import NoiseSpec


def make_optimizer(subject: Subject, setting: Setting) -> tuple[nn.Module, Any]:
    """What the subject's method trains, and by which optimizer; on path="alone", of layers that have no rule."""
    model, optimizer = _made(subject, setting)
    return (without_rules(model) if subject.path == "alone" else model), optimizer


def _made(subject: Subject, setting: Setting) -> tuple[nn.Module, Any]:
    model = subject.build()
    if not isinstance(subject.method, str):
        return model, subject.method(model)
    defaults = describe(subject.method).defaults
    options: dict[str, Any] = {"mc_samples": setting.mc_samples} if "mc_samples" in defaults else {}
    learner = method(subject.method, model, dataset_size=setting.size, lr=setting.lr, **options)
    return learner.model, learner.optimizer


class _WatchedNoise:
    """The run's own noise source, or what the auditor answers in its place."""

    generator = None

    def __init__(self, session: EngineSession, own: Any) -> None:
        self.session, self.own = session, own

    def normal(self, like: Tensor, std: float) -> Tensor:
        self.session.charged.append(len(self.session.accountant()))
        if self.session.answer is None:
            drawn: Tensor = self.own.normal(like, std)
            return drawn
        return self.session.answer(like, std)


class EngineSession:
    def __init__(self, subject: Subject, setting: Setting, answer: Answer | None) -> None:
        self.subject, self.setting, self.answer = subject, setting, answer
        self.charged: list[int] = []
        torch.manual_seed(setting.seed)
        self.engine = PrivacyEngine(generator=torch.default_generator)  # equal settings, equal streams
        model, self.inner = make_optimizer(subject, setting)
        self.module = model
        loader = DataLoader(TensorDataset(subject.inputs, subject.labels), batch_size=1)
        self.criterion = PerExampleLoss(subject.loss)
        made = self.engine.make_private(
            module=model,
            optimizer=self.inner,
            data_loader=loader,
            noise_multiplier=setting.sigma,
            max_grad_norm=setting.bound,
            dataset_size=setting.size,
            expected_batch_size=setting.batch,
            augmentations=subject.views,
        )
        self.model, self.optimizer, self.loader = made
        self.optimizer.noise = _WatchedNoise(self, self.optimizer.noise)
        self._batches: Iterator[Any] = iter(())
        self._t = 0

    # ---- steps

    def step(self, rows: Sequence[int], *, run: int = 0) -> Observed:
        next(iter(self.loader))  # one draw is spent; the batch is the auditor's
        before = self.optimizer.last_release
        seen = self._step(*self._batch(rows))
        if self.optimizer.last_release is before:
            raise PrivacyError(f"A step on a batch of {len(rows)} released nothing.")
        return seen

    def step_in_parts(self, rows: Sequence[int]) -> list[Observed]:
        next(iter(self.loader))
        size = max(1, -(-len(rows) // 3))
        parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        seen = []
        for i, part in enumerate(parts):
            self.optimizer.begin_micro_batch(first=i == 0, last=i == len(parts) - 1)
            before = self.optimizer.last_release
            observed = self._step(*self._batch(part))
            if self.optimizer.last_release is not before:
                seen.append(observed)
        self.optimizer.abandon_virtual_batch()
        return seen

    def leave_half_way(self, rows: Sequence[int]) -> bool:
        next(iter(self.loader))
        self.optimizer.begin_micro_batch(first=True, last=False)
        self._step(*self._batch(rows))
        return True

    def rebound(self, bound: float) -> bool:
        self.optimizer.max_grad_norm = bound
        return True

    def train(self, steps: int) -> None:
        done = 0
        while done < steps:
            for x, y in self.loader:
                self._step(*(t.repeat_interleave(self.subject.views, 0) for t in (x, y)))
                done += 1
                if done == steps:
                    return

    def _batch(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        index = torch.tensor(list(rows), dtype=torch.int64).repeat_interleave(self.subject.views)
        return self.subject.inputs[index], self.subject.labels[index]

    def _step(self, x: Tensor, y: Tensor) -> Observed:
        torch.manual_seed(
            self.setting.seed + 1000 + self._t
        )  # what a random forward pass draws is the same in two worlds
        self._t += 1
        self.optimizer.zero_grad()
        draws = self.inner.mc_samples if isinstance(self.inner, IVON) else 1
        with self.subject.around_a_step():
            for _ in range(draws):
                with self.optimizer.sampled_params(train=True) if isinstance(self.inner, IVON) else nullcontext():
                    theta = [p.detach().clone() for p in self.module.parameters() if p.requires_grad]
                    self.criterion(self.model(x), y).backward()
            self.optimizer.step()
        release = self.optimizer.last_release
        if release is None:  # of a part of a batch
            return Observed(torch.zeros(0), 0.0, theta, draws)
        released = torch.cat([release.gradients[p].detach().flatten().double() for p in self.optimizer.params])
        return Observed(released, release.variance, theta, draws)

    # ---- what is stated and kept

    def spec(self, run: int = 0) -> NoiseSpec:
        stated: NoiseSpec = self.optimizer.spec
        return stated

    def accountant(self, run: int = 0) -> Accountant:
        return self.engine.accountant

    def sampled(self, steps: int) -> list[list[int]]:
        sampler = self.loader.batch_sampler
        sampler.steps = steps
        return list(sampler)

    def state(self) -> list[Tensor]:
        posterior = self.optimizer.posterior()
        learned = [*getattr(posterior, "mean", {}).values(), *getattr(posterior, "variance", {}).values()]
        kept = list(_flat(self.optimizer.state_dict()))
        return [p.detach() for p in self.module.parameters()] + kept + learned

    def network_as_trained(self) -> nn.Module:
        return make_optimizer(self.subject, self.setting)[0]

    def means(self, run: int = 0) -> Tensor:
        return torch.cat([p.detach().flatten().double() for p in self.optimizer.params])


def _flat(value: Any) -> Iterator[Tensor]:
    """The tensors and numbers in nested state, in a fixed order."""
    if isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _flat(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield torch.tensor(float(value), dtype=torch.float64)
