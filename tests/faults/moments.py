"""At which moment a process dies: told by the process itself while it lives, or chosen by it to the system call.

A kill from outside falls at random, and seldom into the microseconds of one write. So a process can also be aimed: it sends
itself the same SIGKILL before, within or after the n-th write, sync or replacement of a file.
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dpivon.durable import checkpoint, files, ledger

PHASES = ("beginning", "gradients and update", "charging", "saving a checkpoint")
#: Where a process can be aimed at. Only the second leaves a release of which nobody knows what it was made of.
POINTS = (
    "before a charge",
    "half a charge written",
    "a charge written, not synced",
    "a charge synced, its noise not drawn",
    "half a checkpoint written",
    "a checkpoint written, not synced",
    "a checkpoint synced, not in place",
    "a checkpoint in place, its folder not synced",
    "half a merged ledger written",
    "a merged ledger synced, not in place",
    "a merged ledger in place, its folder not synced",
)
TORN = POINTS[1]


class Clock:
    """One byte that parent and child share: what the child is doing."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 1)

    @property
    def phase(self) -> str:
        return PHASES[self._shared[0]]

    def watch(self) -> None:
        """In the child, from here on."""
        ledger.Ledger.charge = self._during(ledger.Ledger.charge, 2)  # type: ignore[method-assign]
        checkpoint.Rotation.write = self._during(checkpoint.Rotation.write, 3)  # type: ignore[method-assign]

    def _during(self, call: Callable[..., Any], phase: int) -> Any:
        def timed(*args: Any, **options: Any) -> Any:
            self._shared[0] = phase
            try:
                return call(*args, **options)
            finally:
                self._shared[0] = 1

        return timed


@dataclass
class Aim:
    """Die at the n-th time that this point is passed."""

    point: str
    n: int

    def set(self) -> None:
        """In the child. Ledgers are merged every dozen lines, so that a short run does it too."""
        ledger.MOST_LINES = 12
        ledger.os = _Charges(self)  # type: ignore[assignment]
        files.os = _Replacements(self)  # type: ignore[assignment]

    def passed(self, point: str) -> None:
        if self.now(point):
            die()

    def now(self, point: str) -> bool:
        if point != self.point:
            return False
        self.n -= 1
        return self.n == 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Same(ModuleType):
    """``os`` but for what is overridden."""

    def __init__(self, aim: Aim) -> None:
        super().__init__("os")
        self.aim = aim

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class _Charges(_Same):
    def write(self, file: int, content: memoryview) -> int:
        self.aim.passed(POINTS[0])
        if self.aim.now(TORN):
            os.write(file, content[: len(content) // 2])
            die()
        return os.write(file, content)

    def fsync(self, file: int) -> None:
        self.aim.passed(POINTS[2])
        os.fsync(file)
        self.aim.passed(POINTS[3])


class _Replacements(_Same):
    def fsync(self, file: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{file}"))
        half, whole = {"release": (4, 5), "ledger": (8, None)}.get(_kind(name), (None, None))
        if half is not None and self.aim.now(POINTS[half]):
            os.ftruncate(file, os.fstat(file).st_size // 2)
            die()
        if whole is not None:
            self.aim.passed(POINTS[whole])
        os.fsync(file)

    def replace(self, temporary: Any, path: Any) -> None:
        before, after = {"release": (6, 7), "ledger": (9, 10)}.get(_kind(os.path.basename(path)), (None, None))
        if before is not None:
            self.aim.passed(POINTS[before])
        os.replace(temporary, path)
        if after is not None:
            self.aim.passed(POINTS[after])


def _kind(name: str) -> str:
    return next((kind for kind in ("release", "ledger") if name.lstrip(".").startswith(kind)), "")
