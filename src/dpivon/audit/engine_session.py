"""One run under ``PrivacyEngine``, watched at its noise source and at its release."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from dpivon.audit.session import Answer, Observed, Session, Setting, Subject
from dpivon.errors import PrivacyError
from dpivon.methods import describe, method
from dpivon.optim.ivon import IVON
from dpivon.privacy.accounting import Accountant
from dpivon.privacy.engine import PrivacyEngine
from dpivon.privacy.layers.registry import forward_for, rule_for
from dpivon.privacy.logical_batch import _Split
from dpivon.privacy.losses import PerExampleLoss
from dpivon.privacy.mechanism import NoiseSpec
from dpivon.privacy.noise import TorchNoise


def make_optimizer(subject: Subject, setting: Setting) -> tuple[nn.Module, Any]:
    """What the subject's method trains, and by which optimizer; on path="alone", of layers that have no rule."""
    model = subject.build()
    if isinstance(subject.method, str):
        defaults = describe(subject.method).defaults
        options: dict[str, Any] = {"mc_samples": setting.mc_samples} if "mc_samples" in defaults else {}
        learner = method(subject.method, model, dataset_size=setting.size, lr=setting.lr, **options)
        model, optimizer = learner.model, learner.optimizer
    else:
        optimizer = subject.method(model)
    return (without_rules(model) if subject.path == "alone" else model), optimizer


def without_rules(model: nn.Module) -> nn.Module:
    """The same model, with every layer that has a rule made an instance of a subclass, which has none.

    It computes what it did on the same parameters. Rules are for exact types, and ``runs_alone`` lets book-keeping run each of
    these layers example by example.
    """
    for layer in model.modules():
        if rule_for(layer) is not None or forward_for(layer) is not None:
            kind: Any = type(layer)
            layer.__class__ = _subclass(kind)
    return model


@functools.cache
def _subclass(kind: Any) -> Any:
    return type(f"Own{kind.__name__}", (kind,), {"runs_alone": True})


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


class EngineSession(Session):
    def __init__(
        self, subject: Subject, setting: Setting, answer: Answer | None, engine: PrivacyEngine | None = None
    ) -> None:
        super().__init__(subject, setting, answer)
        torch.manual_seed(setting.seed)
        self.engine = engine or PrivacyEngine(generator=torch.default_generator)  # equal settings, equal streams
        self.module, self.inner = make_optimizer(subject, setting)
        self.criterion, self._t = PerExampleLoss(subject.loss), 0
        self._owners = torch.tensor([i for i in range(len(subject.inputs)) for _ in range(subject.rows_of(i))])
        self._data = TensorDataset(subject.inputs[self._owners], subject.labels[self._owners])
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=self.module,
            optimizer=self.inner,
            data_loader=DataLoader(self._data, batch_size=1),
            noise_multiplier=setting.sigma,
            max_grad_norm=setting.bound,
            dataset_size=setting.size,
            expected_batch_size=setting.batch,
            augmentations=subject.views,
            user_ids=self._owners if subject.rows_per_user > 1 else None,
            rows_per_user=subject.rows_per_user if subject.rows_per_user > 1 else None,  # all rows that a person has
        )
        self.watch_noise()

    def watch_noise(self) -> None:
        self.optimizer.noise = _WatchedNoise(self, self.optimizer.noise)

    def standard_normal(self, like: Tensor) -> Tensor:
        """As the path draws it, beside the auditor."""
        drawn: Tensor = self.optimizer.noise.own.normal(like, 1.0)
        return drawn

    @contextmanager
    def noted(self, found: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Inside, note every sum that gets noise, with that noise. The source of it stays the run's own."""
        own = TorchNoise.normal

        def normal(source: TorchNoise, like: Tensor, std: float) -> Tensor:
            noise = own(source, like, std)
            found.append((like.flatten().clone(), noise.flatten()))
            return noise

        TorchNoise.normal = normal  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            TorchNoise.normal = own  # type: ignore[method-assign]

    # ---- steps

    def step(self, rows: Sequence[int]) -> Observed:
        next(iter(self.loader))  # one draw is spent; the batch is the auditor's
        before = self.optimizer.last_release
        seen = self._step(*self._batch(rows))
        if self.optimizer.last_release is before or self.optimizer.last_release is None:
            raise PrivacyError(f"A step on a batch of {len(rows)} released nothing.")
        return seen

    def step_in_parts(self, rows: Sequence[int]) -> list[Observed]:
        next(iter(self.loader))
        chosen = _Chosen(self._rows(rows), self._sizes(rows))
        split = _Split(chosen, max(1, -(-len(chosen.rows) // 3)), even=False)
        seen = []
        for part in split:
            first, last, sizes = split.flags.popleft()
            self.optimizer.begin_micro_batch(first=first, last=last)
            self.optimizer.draws.sizes, self.optimizer.draws.batch = sizes, None
            before = self.optimizer.last_release
            observed = self._step(*self._taken(part))
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

    def renoise(self, sigma: float) -> bool:
        self.optimizer.noise_multiplier = sigma
        return True

    def train(self, steps: int) -> None:
        forever = itertools.chain.from_iterable(itertools.repeat(self.loader))
        for x, y in itertools.islice(forever, steps):
            self._step(*(t.repeat_interleave(self.subject.views, 0) for t in (x, y)))

    def _batch(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A batch of these examples; where they are people, with all their rows, and the optimizer knows whose each is."""
        self.optimizer.draws.sizes, self.optimizer.draws.batch = self._sizes(rows), None
        return self._taken(self._rows(rows))

    def _sizes(self, examples: Sequence[int]) -> tuple[int, ...] | None:
        return tuple(map(self.subject.rows_of, examples)) if self.subject.rows_per_user > 1 else None

    def _rows(self, examples: Sequence[int]) -> list[int]:
        return [row for i in examples for row in (self._owners == i).nonzero().flatten().tolist()]

    def _taken(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        index = torch.tensor(list(rows), dtype=torch.int64).repeat_interleave(self.subject.views)
        inputs, labels = self._data.tensors
        return inputs[index], labels[index]

    def _step(self, x: Tensor, y: Tensor) -> Observed:
        torch.manual_seed(self.setting.seed + 1000 + self._t)  # a random forward pass draws the same in two worlds
        self._t += 1
        self.optimizer.zero_grad()
        draws = self.inner.mc_samples if isinstance(self.inner, IVON) else 1
        with self.subject.around_a_step():
            for _ in range(draws):
                with self.optimizer.sampled_params(train=True) if isinstance(self.inner, IVON) else nullcontext():
                    theta = [p.detach().clone() for p in self.module.parameters() if p.requires_grad]
                    self.criterion(self.model(x), y).backward()
            self.optimizer.step()
        return self._observed(theta, draws)

    def _observed(self, theta: list[Tensor], draws: int) -> Observed:
        release = self.optimizer.last_release
        if release is None:  # of a part of a batch
            return Observed(torch.zeros(0), 0.0, theta, draws)
        released = torch.cat([release.gradients[p].detach().flatten().double() for p in self.optimizer.params])
        return Observed(released, release.variance, theta, draws)

    # ---- what is stated and kept

    def spec(self) -> NoiseSpec:
        stated: NoiseSpec = self.optimizer.spec
        return stated

    def accountant(self) -> Accountant:
        return self.engine.accountant

    def sampled(self, steps: int) -> list[list[int]]:
        sampler = self.loader.batch_sampler
        sampler.steps = steps
        drawn = list(sampler)
        if self.subject.rows_per_user > 1:
            drawn = [list(dict.fromkeys(self._owners[rows].tolist())) for rows in drawn]
        return drawn

    def state(self) -> list[Tensor]:
        posterior = self.optimizer.posterior()
        learned = [*getattr(posterior, "mean", {}).values(), *getattr(posterior, "variance", {}).values()]
        kept = list(_flat(self.optimizer.state_dict()))
        return [p.detach() for p in self.module.parameters()] + kept + learned

    def network_as_trained(self) -> nn.Module:
        return make_optimizer(self.subject, self.setting)[0]

    def means(self) -> Tensor:
        return torch.cat([p.detach().flatten().double() for p in self.optimizer.params])


class _Chosen(Sampler[list[int]]):
    """A sampler of one batch, which the auditor chose."""

    def __init__(self, rows: list[int], sizes: tuple[int, ...] | None) -> None:
        self.rows, self.people = rows, sizes
        self.sizes = deque([] if sizes is None else [sizes])

    def __iter__(self) -> Iterator[list[int]]:
        yield self.rows


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
