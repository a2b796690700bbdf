"""The private loop: the ordinary one, kept by :class:`dpivon.Checkpoints`, watched through a small protocol."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpivon.decisions import shares_of
from dpivon.errors import BudgetSpent, bad
from dpivon.gaussian import regression_scores
from dpivon.metrics import accuracy, nll
from dpivon.optim.ivon import IVON
from dpivon.privacy import BatchMemoryManager, Checkpoints, PerExampleLoss, PrivacyEngine
from dpivon.privacy.accounting.history import Entry
from dpivon.privacy.counting import NoisySums, class_counts, class_factors, class_thresholds, sets_cost, shares_cost
from dpivon.privacy.noise import SecureNoise, TorchNoise
from dpivon.privacy.people import People
from dpivon.sources import Examples
from dpivon.train.artefacts import Line, Progress
from dpivon.train.config import COUNT, Config, fixed
from dpivon.train.published import Description, assembled

HELDOUT_DRAWS = 8


@dataclass(frozen=True)
class Seeds:
    """One for each purpose; from the operating system, unless somebody wants the same run again."""

    seed: int | None

    def number(self, purpose: str) -> int:
        if self.seed is None:
            return secrets.randbits(62)
        return int.from_bytes(hashlib.sha256(f"{self.seed} {purpose}".encode()).digest()[:8], "big") >> 2

    def generator(self, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        return torch.Generator(device).manual_seed(self.number(purpose))


class Sums:
    """What was released besides gradients, kept in the checkpoints."""

    def __init__(self) -> None:
        self.counts: list[float] = []
        self.factors: list[float] = []
        self.thresholds: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Loop:
    """A run that trains, or goes on training, in a folder."""

    def __init__(
        self,
        config: Config,
        description: Description,
        examples: Examples,
        folder: Path,
        people: People | None = None,
    ) -> None:
        self.config, self.description = config, description
        self.device = device_of(config.device)
        assert examples.targets is not None
        seeds = Seeds(config.seed)
        torch.manual_seed(seeds.number("weights"))
        self.learner = description.learner(seeds.generator("theta", self.device), config.ema)
        self.learner.model.to(self.device)
        self.engine = PrivacyEngine(accountant=config.accountant, secure_mode=config.secure)
        own = config.seed is not None and not config.secure
        # Weighted example by example: a mean over the batch's weights would let one example rescale the others.
        self.weights = torch.ones(len(config.classes), device=self.device)
        weighted = PerExampleLoss(nn.CrossEntropyLoss(weight=self.weights))
        self.loss: Any = weighted if config.weighted_loss else nn.CrossEntropyLoss()
        if description.noise is not None:
            self.loss = PerExampleLoss(description.noise)
        self.examples, self.people, self.sums = examples, people, Sums()
        self.model, self.optimizer, self.loader = self.learner.make_private_with_epsilon(
            self.engine,
            DataLoader(
                TensorDataset(examples.inputs, examples.targets),
                batch_size=config.batch_size,
                generator=seeds.generator("batches") if own else None,
            ),
            target_epsilon=config.epsilon,
            target_delta=config.delta,
            epochs=config.epochs,
            max_grad_norm=config.max_grad_norm,
            dataset_size=config.dataset_size,
            expected_batch_size=config.batch_size,
            also=config.also,
            noise_generator=seeds.generator("noise", self.device) if own else None,
            criterion=self.loss,
            user_ids=people,
        )
        self.draws = self.learner.optimizer.mc_samples if isinstance(self.learner.optimizer, IVON) else 1
        self.kept = Checkpoints(
            folder,
            engine=self.engine,
            optimizer=self.optimizer,
            data_loader=self.loader,
            also={"sums": self.sums} if config.also else None,
            config=fixed(config),
        )
        self.progress = Progress(folder)
        self.done, self.before = 0, 0.0  # steps, and seconds of earlier processes
        self.spent = False  # whether the budget refused a step
        self.optimizer.attach_step_hook(self._count)

    def _count(self, optimizer: Any) -> None:
        self.done += 1

    @property
    def steps(self) -> int:
        """The planned number: ⌈N/b⌉ per epoch, of public numbers."""
        return self.config.epochs * len(self.loader)

    @property
    def epsilon(self) -> float:
        return self.engine.get_epsilon(self.config.delta) if len(self.engine.accountant) else 0.0

    def train(self, heldout: Examples | None, show: Callable[[Line | None, int], None]) -> None:
        """To the end of the plan or of the budget. ``show(line, step)``: after every step, with a line after an evaluation."""
        resumed = self.kept.restore()
        self.done = resumed.steps
        self._decide()
        self.before = self.progress.resume(resumed.steps)
        self.began = saved = time.monotonic()
        if self.progress.last is not None:
            show(self.progress.last, self.done)
        main = threading.current_thread() is threading.main_thread()
        signals: AbstractContextManager[None] = self.kept.saving_on_signals() if main else nullcontext()
        with signals:
            for epoch in range(resumed.epoch, self.config.epochs):
                for _ in self._pass():
                    show(None, self.done)
                    if time.monotonic() - saved > self.config.checkpoint_seconds:
                        self.kept.save()
                        saved = time.monotonic()
                line = self._line(epoch + 1, heldout)
                self.progress.add(line)
                show(line, self.done)
                self.kept.save()
                saved = time.monotonic()
                if self.spent:
                    break

    def _decide(self) -> None:
        """How the model will answer, and what classes weigh in its loss: before the first step, counted if that is wanted."""
        config = self.config
        if config.prior == COUNT and not self.sums.counts:
            assert self.examples.targets is not None
            self.sums.counts = class_counts(
                self.examples.targets, len(config.classes), self._noisy("counts", self._shares, self.people)
            )
            self.kept.save()  # a crash before it costs the count once more
        self.decision = config.decision(shares_of(self.sums.counts) if self.sums.counts else None)
        if self.decision.weights:
            self.weights.copy_(torch.tensor(self.decision.weights))

    def calibrate(self, rows: Examples | None, people: People | None) -> None:
        """Factors by the classes' shares, from the training rows; thresholds of prediction sets from ``rows``, if any."""
        config, sums = self.config, self.sums
        if self.decision.prior and not sums.factors:
            counts = sums.counts or [config.dataset_size * share for share in self.decision.prior]
            noisy = self._noisy("factors", self._shares, self.people)
            sums.factors = list(class_factors(self._predicted(self.examples), counts, noisy))
            self.kept.save()
        self.decision = self.decision.model_copy(update={"factors": tuple(sums.factors)})
        if rows is not None and not sums.thresholds:
            assert config.coverage is not None
            assert rows.targets is not None
            noisy = self._noisy("sets", sets_cost(config.epsilon, config.delta), people)
            sums.thresholds = list(class_thresholds(self._predicted(rows), rows.targets, config.coverage, noisy))
            self.kept.save()
        self.decision = self.decision.model_copy(update={"thresholds": tuple(sums.thresholds)})

    def _predicted(self, rows: Examples) -> Tensor:
        """As the published model predicts."""
        model = assembled(self.description, self.learner.posterior(), self.decision)
        return model.predict(rows.inputs).probs.cpu()

    @property
    def _shares(self) -> Entry:
        return shares_cost(self.config.epsilon, self.config.delta, counted=self.config.prior == COUNT)

    def _noisy(self, purpose: str, cost: Entry, people: People | None) -> NoisySums:
        seeded = self.config.seed is not None and not self.config.secure
        noise = TorchNoise(Seeds(self.config.seed).generator(purpose)) if seeded else SecureNoise()
        return NoisySums(cost[0], noise, self.engine._charge, people)

    def _pass(self) -> Iterator[None]:
        """Train for the rest of an epoch, one item per micro-batch; ends where the budget refuses a step."""
        size = self.config.physical_batch_size
        with BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=size, optimizer=self.optimizer
        ) as batches:
            for x, y in batches:
                try:
                    self._step(x.to(self.device), y.to(self.device))
                except torch.OutOfMemoryError:
                    batches.retry()
                except BudgetSpent:
                    self.spent = True
                    return
                yield

    def _step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.draws):
            with self.learner.sample():
                self.loss(self.model(x), y).backward()
        self.optimizer.step()

    def _line(self, epoch: int, heldout: Examples | None) -> Line:
        seconds = self.before + time.monotonic() - self.began
        line = Line(self.done, self.steps, epoch, self.epsilon, self.config.delta, seconds)
        if heldout is None or heldout.targets is None:
            return line
        generator = torch.Generator().manual_seed(0)
        draws = min(HELDOUT_DRAWS, self.config.samples)
        if (noise := self.description.noise) is not None:
            options = {"generator": generator, "likelihood": "gaussian", "noise_variance": noise.moments}
            found = self.description.in_units(self.learner.predict(heldout.inputs, draws, **options))
            return replace(line, heldout_nll=regression_scores(found, self.description.target_values(heldout))["nll"])
        probs = self.learner.predict(heldout.inputs, draws, generator=generator).probs.cpu()
        loss, right = nll(probs, heldout.targets), accuracy(probs, heldout.targets)
        return replace(line, heldout_nll=loss, heldout_accuracy=right)

    def close(self) -> None:
        if self.engine.ledger is not None:
            self.engine.ledger.close()


def device_of(name: str) -> torch.device:
    fix = "Use cpu, or cuda where there is a GPU"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise bad("device", name, "is not a known device", fix) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise bad("device", name, "there is no GPU that torch can use", fix)
    return device
