"""What a worker does: one attempt at one stack, from wherever an earlier attempt left it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpivon._version import __version__
from dpivon.durable.files import SECRET, replace
from dpivon.durable.ledger import Terms
from dpivon.errors import ArgumentError, PrivacyError, bad
from dpivon.study.cluster.desk import Report
from dpivon.study.plan.data import StudyData
from dpivon.study.plan.plan import Plan, PlannedRun
from dpivon.study.results.folder import Results
from dpivon.study.run.progress import Left
from dpivon.study.run.settings import Settings
from dpivon.study.run.work import Custody, Work, clear, fitting

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Cargo:
    """The data, read by the driver, so that no worker needs its files."""

    data: tuple[Array, ...]

    @property
    def bytes(self) -> int:
        return sum(a.nbytes for a in self.data)

    @property
    def examples(self) -> int:
        return len(self.data[0])

    def unpack(self, device: torch.device) -> StudyData:
        """What was packed, on a device."""
        return StudyData(*(_tensor(a).to(device) for a in self.data))


def pack(data: StudyData) -> Cargo:
    return Cargo(tuple(t.numpy() for t in (data.images, data.labels, data.eval_images, data.eval_labels)))


def _tensor(array: Array) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)  # it is only read
        return torch.from_numpy(array)


TOKEN = ".cluster"  # a file in OUT: who can read what the driver wrote there sees the same folder
_EVERY = 0.5  # seconds between reports


@dataclass(frozen=True)
class Task:
    """One stack, as the driver hands it out."""

    plan: Plan
    runs: tuple[PlannedRun, ...]
    stack: str  # the name of its folder
    attempt: int
    title: str
    out: Path
    token: str
    settings: Settings
    device: str
    scratch: Path | None
    version: str = __version__
    known: Mapping[str, int] = field(default_factory=dict)  # runs that have their rows, as Work knows them
    paths: tuple[str, ...] = ()  # where the driver finds modules: import paths are looked up there too

    @property
    def folder(self) -> Path:
        return self.out / "stacks" / self.stack


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: with every run's row handed over, stopped in good order (neither), or with an error."""

    finished: bool = False
    error: str = ""
    hopeless: bool = False  # the same would happen again
    notes: tuple[str, ...] = ()
    where: str = ""


def attempt(task: Task, cargo: Cargo, desk: Any) -> Ended:
    """Train a stack to its rows. Whatever is raised comes back in words: an error of ours need not survive pickling."""
    where = f"{platform.node()}, process {os.getpid()}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("once")
        try:
            finished, error, hopeless = _train(task, cargo, desk, where), "", False
        except Exception as raised:
            finished, error = False, f"{type(raised).__name__}: {raised}"
            hopeless = isinstance(raised, (ArgumentError, PrivacyError))
            if not hopeless:
                error += f" ({traceback.extract_tb(raised.__traceback__)[-1]})"
        finally:
            clear(torch.device(task.device))
    return Ended(finished, error, hopeless, tuple(dict.fromkeys(str(w.message) for w in caught)), where)


def _train(task: Task, cargo: Cargo, desk: Any, where: str) -> bool:
    if task.version != __version__:
        problem = f"is not the driver's, which is {task.version}"
        raise bad("version", __version__, problem, f"Install the same dpivon on {platform.node()}")
    sys.path += [path for path in task.paths if path not in sys.path]
    line = _Line(task, desk, where)
    if not line.ask("begin", Report(task.attempt, where=where)):
        return False
    device = torch.device(task.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # a core is what was asked for
    with _folder(task, line) as (folder, custody), fitting(task.runs, folder):
        data = cargo.unpack(device)
        work = Work(task.plan, task.runs, folder, data, task.settings, device, line, task.title, custody, task.known)
        with closing(work.kept):
            if not work.train(line.stop):
                return False
            return work.evaluate(line.deliver, lambda: line.stop() and work.got_on)


@contextmanager
def _folder(task: Task, line: _Line) -> Iterator[tuple[Path, Custody]]:
    """Where the stack is kept while it trains, and who keeps it besides."""
    if task.scratch is None and _sees(task.out, task.token):
        yield task.folder, _Fence(line)
        return
    if task.scratch is not None:
        task.scratch.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"dpivon-{task.stack}-", dir=task.scratch))
    try:
        for name, content in line.ask("files", task.attempt).items():
            replace(folder / name, content, mode=SECRET)
        yield folder, _Keeper(line)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sees(out: Path, token: str) -> bool:
    try:
        return (out / TOKEN).read_text() == token
    except OSError:
        return False


class _Fence(Custody):
    """For a worker that sees OUT: it goes on only as long as it is the stack's current attempt."""

    def __init__(self, line: _Line) -> None:
        self.line = line

    def ahead(self, terms: Terms, upto: int) -> None:
        self.line.hear(self.line.ask("reserve", self.line.attempt, terms, upto))


class _Keeper(_Fence):
    """For one that does not: charges are on the driver's disk before the releases are made, and checkpoints follow."""

    def saved(self, checkpoint: Path, charged: int) -> None:
        self.line.ask("keep", self.line.attempt, checkpoint.name, checkpoint.read_bytes(), charged)


class _Line:
    """A worker's line to the desk. It stands for the display of a study: the driver shows what it receives."""

    def __init__(self, task: Task, desk: Any, where: str) -> None:
        self.stack, self.attempt, self._desk, self._where = task.stack, task.attempt, desk, where
        self._restored = self._done = 0.0
        self._answer: Any = None
        self._last = float("-inf")
        self._stop = False

    def ask(self, method: str, *arguments: Any) -> Any:
        """Wait for the answer. Without a desk there is no driver to train for."""
        return _ray().get(getattr(self._desk, method).remote(self.stack, *arguments))

    def hear(self, go_on: bool) -> None:
        """What the desk says of going on. An answer that was under way when the study was stopped does not take it back."""
        self._stop = self._stop or not go_on

    def stop(self) -> bool:
        if self._answer is not None and _ray().wait([self._answer], timeout=0)[0]:
            self.hear(_ray().get(self._answer))
            self._answer = None
        return self._stop

    def deliver(self, results: Results) -> None:
        """The driver alone writes the tables."""
        self.ask("deliver", self.attempt, results)

    def skip(self, examples: float) -> None:
        self._restored += examples
        self._done += examples

    def advance(self, examples: float, where: Callable[[], str]) -> None:
        self._done += examples
        self._report(where)

    def evaluating(self, left: Left, where: Callable[[], str]) -> None:
        self._report(lambda: where() + left.words)

    def _report(self, where: Callable[[], str]) -> None:
        if time.monotonic() - self._last < _EVERY or self._answer is not None:
            return
        self._last = time.monotonic()
        report = Report(self.attempt, self._restored, self._done, where(), self._where)
        self._answer = self._desk.report.remote(self.stack, report)

    def say(self, line: str) -> None:
        """The driver says when a stack is finished."""


def _ray() -> Any:
    import ray

    return ray
