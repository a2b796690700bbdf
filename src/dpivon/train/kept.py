"""A private run by the engine, from its first step to its last: kept in a folder if there is one, and gone on with there."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data._utils.collate import default_collate

from dpivon.durable.ledger import Ledger
from dpivon.errors import BudgetSpent
from dpivon.methods import Learner
from dpivon.privacy import Checkpoints, PrivacyEngine
from dpivon.privacy.compiled import LossFn
from dpivon.privacy.kernels.padded import convolves, examples_at_once
from dpivon.train.artefacts import Line, Progress

LINES = 25  # of progress, with an ε each, that a run of many short epochs has at least

Evaluate = Callable[[], Mapping[str, Any]]
Data = Dataset[Any] | tuple[Tensor, ...]
_AT_ONCE = 256  # examples of a pass on a CPU
_CHARGED = 0.25  # seconds of steps that one write to the ledger charges on a GPU, where a lost step is not made again


class Rows(TensorDataset):
    """Rows of tensors, of which a loader takes a batch at a time."""

    def __getitems__(self, index: list[int]) -> tuple[Tensor, ...]:
        first = self.tensors[0]
        # Pinned: from other memory the copy would wait for all steps under way.
        at = torch.tensor(index, dtype=torch.int64, pin_memory=first.is_cuda).to(first.device, non_blocking=True)
        return tuple(t[at] for t in self.tensors)


def as_batch(rows: Any) -> Any:
    """A batch as it is, or one made of examples."""
    return default_collate(rows) if isinstance(rows, list) else rows


def loader_of(
    data: Data, device: torch.device, batch_size: int, generator: torch.Generator | None, collate_fn: Any = as_batch
) -> DataLoader[Any]:
    """A loader of the data; tensors go to the device where they take at most a quarter of it, and are pinned where not."""
    dataset: Any = data
    if isinstance(data, tuple):
        cuda, size = device.type == "cuda", sum(t.nbytes for t in data)
        moved = cuda and size <= torch.cuda.get_device_properties(device).total_memory // 4
        dataset = Rows(*(t.to(device) if moved else t for t in data))
    there = isinstance(dataset, Rows) and dataset.tensors[0].is_cuda
    pinned = device.type == "cuda" and not there
    return DataLoader(dataset, batch_size, generator=generator, pin_memory=pinned, collate_fn=collate_fn)


def at_once(given: int | None, model: nn.Module, data: Data, device: torch.device, views: int = 1) -> int | None:
    """How many examples run at once: as given, or on a CPU 256 and of images what ``compile`` chooses, and on a GPU as many as
    fit; None if that is not known."""
    if given is None and device.type == "cpu":
        return None if isinstance(data, tuple) and convolves(model, data) else _AT_ONCE
    if given is not None:
        return given
    return examples_at_once(copy.deepcopy(model), data[0][:1].to(device), views) if isinstance(data, tuple) else None


class KeptRun:
    """Trains what ``make_private`` made by compiled steps, within the engine's budget.

    Args:
        folder: where ledger, checkpoints and progress are kept; None keeps nothing.
        engine: the engine.
        learner: the method at work.
        made: what ``make_private`` returned.
        losses: ``losses(model, batch)``, one per row.
        epochs: length of the run.
        delta: δ, for the ε that is shown.
        config: what must be the same when the run goes on.
        physical_batch_size: how many examples run at once (:func:`at_once`); None for all that are drawn.
        checkpoint_seconds: how often it is saved within an epoch.
        also: more to be kept with checkpoints, by name.
        dataset_digest: of rows that are not trained on and must be the same too when the run goes on.
    """

    def __init__(
        self,
        folder: Path | None,
        engine: PrivacyEngine,
        learner: Learner,
        made: tuple[Any, Any, Any],
        losses: LossFn,
        *,
        epochs: int,
        delta: float,
        config: Any = None,
        physical_batch_size: int | None = None,
        checkpoint_seconds: float = 30.0,
        also: Mapping[str, Any] | None = None,
        dataset_digest: str = "",
    ) -> None:
        self.engine, self.learner, self.epochs, self.delta = engine, learner, epochs, delta
        self.model, self.optimizer, self.loader = made
        self.checkpoint_seconds = checkpoint_seconds
        self.step = engine.compile(losses, max_physical_batch_size=physical_batch_size)
        self.done, self.before = 0, 0.0  # steps, and seconds of earlier processes
        self._at, self._each = time.monotonic(), _CHARGED  # when the last step began, and about how long one takes
        self.spent = False  # whether the budget refused a step
        self.kept = self.progress = None
        if folder is not None:
            self.kept = Checkpoints(
                folder,
                engine=engine,
                optimizer=self.optimizer,
                data_loader=self.loader,
                config=config,
                also=also,
                dataset_digest=dataset_digest,
            )
            self.progress = Progress(folder)
        self.optimizer.attach_step_hook(self._count)

    def _count(self, optimizer: Any) -> None:
        self.done += 1

    @property
    def steps(self) -> int:
        """The planned number: ⌈N/b⌉ per epoch, of public numbers."""
        return self.epochs * len(self.loader)

    @property
    def epsilon(self) -> float:
        return self.engine.get_epsilon(self.delta) if len(self.engine.accountant) else 0.0

    def run(self, show: Callable[[Line | None, int], None], evaluate: Evaluate = dict) -> None:
        """To the end of the plan or of the budget. ``show(line, step)``: after every step, with a line after an epoch.

        What ``evaluate()`` returns is in that line. It may look at held-out rows without noise: it is not private.
        """
        first = 0
        if self.kept is not None and self.progress is not None:
            resumed = self.kept.restore()
            first, self.done = resumed.epoch, resumed.steps
            self._restored()
            self.before = self.progress.resume(resumed.steps)
            if self.progress.last is not None:
                show(self.progress.last, self.done)
        began = saved = time.monotonic()
        main = self.kept is not None and threading.current_thread() is threading.main_thread()
        signals: AbstractContextManager[None] = self.kept.saving_on_signals() if main and self.kept else nullcontext()
        with signals:
            for epoch in range(first, self.epochs):
                for batch in self.loader:
                    self._charge_ahead()
                    if not self._step(batch):
                        break
                    show(None, self.done)
                    if time.monotonic() - saved > self.checkpoint_seconds:
                        saved = self._save()
                if (epoch + 1) % max(1, self.epochs // LINES) and epoch + 1 < self.epochs and not self.spent:
                    continue
                seconds = self.before + time.monotonic() - began
                line = Line(self.done, self.steps, epoch + 1, self.epsilon, self.delta, seconds, **evaluate())
                if self.progress is not None:
                    self.progress.add(line)
                show(line, self.done)
                saved = self._save()
                if self.spent:
                    break

    def _charge_ahead(self) -> None:
        """How many steps the next charge is for: none past the plan, and on a CPU, where a lost step is repeated, one."""
        now = time.monotonic()
        seconds, self._at = now - self._at, now
        ledger = self.engine.ledger
        if isinstance(ledger, Ledger) and self.optimizer.params[0].is_cuda:
            self._each = 0.8 * self._each + 0.2 * seconds
            left = self.steps - ledger.record.releases + ledger.record.earlier
            ledger.ahead = max(1, min(left, int(_CHARGED / self._each)))

    def _restored(self) -> None:
        """Called once before the first step of this process."""

    def _save(self) -> float:
        if self.kept is not None:
            self.kept.save()
        return time.monotonic()

    def _step(self, batch: Any) -> bool:
        """One step; False where the budget refuses it."""
        while True:
            try:
                self.step(batch)
            except torch.OutOfMemoryError:
                self.step.halve()
            except BudgetSpent:
                self.spent = True
                return False
            else:
                return True

    def close(self) -> None:
        if self.engine.ledger is not None:
            self.engine.ledger.close()
