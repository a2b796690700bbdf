"""Where a study stands: a bar where rich and a terminal are there, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any


class Progress:
    """Share, examples a second and time left.

    Counts examples, since they are what takes time: a step of b = 512 costs four of b = 128.
    """

    def __init__(self, total: float, done: float, *, quiet: bool = False, every: float = 15.0) -> None:
        self.total, self.done, self.quiet, self.every = total, done, quiet, every
        self._start, self._at_start, self._last = time.monotonic(), done, -1e9
        self._bar: Any = None
        self._task: Any = None
        if not quiet and sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, Progress, TextColumn
                from rich.table import Column
            except ImportError:
                return
            console = Console(stderr=True)
            share = TextColumn("{task.percentage:5.1f} %", table_column=Column(no_wrap=True, min_width=7))
            bar = [BarColumn(bar_width=20)] if console.width >= 110 else []  # the words come first
            self._bar = Progress(share, *bar, TextColumn("{task.description}"), console=console)
            self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def skip(self, examples: float) -> None:
        """Count what an earlier process did, which says nothing about the speed of this one."""
        self.done += examples
        self._at_start += examples

    def advance(self, examples: float, where: Callable[[], str]) -> None:
        """``where`` makes the words; it is only called when they will be shown."""
        self.done += examples
        now = time.monotonic()
        if self.quiet or now - self._last < (1.0 if self._bar is not None else self.every):
            return
        self._last = now
        rate = (self.done - self._at_start) / max(now - self._start, 1e-9)
        words = where() + (f" · {rate:,.0f}/s" if rate else "")
        if self.done < self.total:  # or all that is left is to be evaluated
            words += f" · {_clock((self.total - self.done) / rate) if rate else '?'} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, description=words)
        else:
            self.say(f"{100 * self.done / self.total:5.1f} % · {words}")

    def say(self, line: str) -> None:
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
