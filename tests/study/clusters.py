"""A Ray cluster on this machine for tests, and what is done to its workers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from tiny_study import PLAN

from dpivon.durable.ledger import read
from dpivon.errors import PrivacyError
from dpivon.study.cluster import attempt
from dpivon.study.cluster.attempt import Cargo, Ended, Task

LONG = replace(PLAN, name="long", epochs=4)


def holder(path: Path) -> int | None:
    """The process, other than this, that has a file open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == str(path) and int(link.parts[2]) != os.getpid():
                return int(link.parts[2])
    return None


def charged(folder: Path) -> int:
    with contextlib.suppress(PrivacyError, OSError):
        return read(folder / "ledger.jsonl").releases
    return 0


@contextlib.contextmanager
def caught(folder: Path, after: int):
    """The process that trains in a folder, stopped where it has made releases that no checkpoint has; None elsewhere."""
    process = holder(folder / "ledger.jsonl.lock") if charged(folder) >= after else None
    try:
        if process is not None:
            os.kill(process, signal.SIGSTOP)
    except ProcessLookupError:
        process = None
    newest = max((int(f.stem.split("-")[1]) for f in folder.glob("release-*.safetensors")), default=0)
    yield process if charged(folder) > newest > 0 else None
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def at_step(
    step: int, happens: Callable[[Task], None], *, report_every: float = attempt._EVERY
) -> Callable[[Task, Cargo, Any], Ended]:
    """A worker to which something happens when it has made ``step`` releases, the last of them in no checkpoint yet.

    It stands in the place of ``engine.attempt``, and Ray sends it to the workers: no race decides what a test sees.
    """

    def attempt_with_it(task: Task, cargo: Cargo, desk: Any) -> Ended:
        advance, examples = attempt._Line.advance, step * sum(run.batch_size for run in task.runs)

        def advanced(line: Any, more: float, where: Callable[[], str]) -> None:
            before = line._done
            advance(line, more, where)
            if before < examples <= line._done:
                happens(task)

        with mock.patch.object(attempt._Line, "advance", advanced), mock.patch.object(attempt, "_EVERY", report_every):
            return attempt.attempt(task, cargo, desk)

    return attempt_with_it


def killed_when_it_has_delivered(rows: Path) -> Callable[[Task, Cargo, Any], Ended]:
    """A worker that is killed in its first attempt when the driver has its first group of rows. Every run is a group."""

    def attempt_with_it(task: Task, cargo: Cargo, desk: Any) -> Ended:
        deliver = attempt._Line.deliver

        def delivered(line: Any, results: Any) -> None:
            deliver(line, results)
            if task.attempt == 1:
                waits_for(rows)(task)
                os.kill(os.getpid(), signal.SIGKILL)

        with mock.patch.object(attempt._Line, "deliver", delivered):
            return attempt.attempt(task, cargo, desk)

    return attempt_with_it


def strikes_the_first(number: signal.Signals, note: Path) -> Callable[[Task], None]:
    """The plan's first run gets a signal, in its first attempt alone; ``note`` then says how much was charged for it."""

    def strike(task: Task) -> None:
        if task.attempt == 1 and task.runs[0] == LONG.runs[0]:
            note.write_text(
                str(max(charged(f) for f in (task.folder, *(task.scratch or task.folder).glob("dpivon-*"))))
            )
            os.kill(os.getpid(), number)

    return strike


def waits_for(file: Path) -> Callable[[Task], None]:
    """It goes on when a file is there."""

    def wait(_task: Task) -> None:
        deadline = time.monotonic() + 180
        while not file.exists():
            assert time.monotonic() < deadline, f"{file} never came"
            time.sleep(0.01)

    return wait
