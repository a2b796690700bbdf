"""Where a study stands: a bar where rich and a terminal are there, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpivon.terminal import printable, say


@dataclass
class Pace:
    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self.amount += amount
        self.seconds += seconds

    @property
    def rate(self) -> float:
        """So much a second; 0 while unknown."""
        return self.amount / max(self.seconds, 1e-9)

    def time(self, amount: float) -> float | None:
        """Seconds that so much more will take; None while unknown."""
        if amount <= 0:
            return 0.0
        return amount / self.rate if self.rate > 0 else None


@dataclass(frozen=True)
class Left:
    """What is left of a stack's evaluation, in forward passes and in runs, and the pace of the passes so far."""

    passes: float
    runs: int
    pace: Pace

    @property
    def seconds(self) -> float | None:
        return self.pace.time(self.passes)

    @property
    def words(self) -> str:
        seconds = self.seconds
        return "" if seconds is None else f" · {self.pace.rate:,.0f} passes/s · {clock(seconds)} for this stack"


def clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


class Progress:
    """Share, examples a second and time left; in an evaluation passes a second.

    Counts examples, since they are what takes time: a step of b = 512 costs four of b = 128. Training and evaluation have a
    clock each: neither is slower for the other.
    """

    def __init__(self, total: float, done: float, *, runs: int = 0, quiet: bool = False, every: float = 15.0) -> None:
        """``total`` and ``done`` are examples to train on, ``runs`` are still to be evaluated."""
        self.total, self.done, self.runs, self.quiet, self.every = total, done, runs, quiet, every
        self._training, self._evaluation = Pace(), Pace()  # of examples, and of runs
        self._mark, self._shown, self._in_stack = time.monotonic(), -1e9, 0
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

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def skip(self, examples: float) -> None:
        """Count what an earlier process did, which says nothing about the speed of this one."""
        self.done += examples

    def advance(self, examples: float, where: Callable[[], str]) -> None:
        """``where`` makes the words; it is only called when they will be shown."""
        self.done += examples
        now = time.monotonic()
        if examples:
            self._training.add(examples, now - self._mark)
            self._mark = now
        if not self._due(now):
            return
        rate = self._training.rate
        words = where() + (f" · {rate:,.0f}/s" if rate else "")
        evaluation = self._evaluation.time(self.runs)
        if self.done < self.total or evaluation:
            words += f" · {self._left(evaluation or 0.0)}{', evaluation not counted' if evaluation is None else ''}"
        self._show(words)

    def evaluating(self, left: Left, where: Callable[[], str]) -> None:
        """Called when an evaluation begins and after each of its runs."""
        now, done = time.monotonic(), max(0, self._in_stack - left.runs)
        self._evaluation.add(done, now - self._mark)
        self.runs -= done
        self._mark, self._in_stack = now, left.runs
        if not self._due(now):
            return
        words, elsewhere = where() + left.words, self._evaluation.time(self.runs - left.runs)
        if left.seconds is not None and elsewhere is not None and (elsewhere or self.done < self.total):
            words += f" · {self._left(left.seconds + elsewhere)}"
        self._show(words)

    def _left(self, evaluation: float) -> str:
        training = self._training.time(self.total - self.done)
        return f"{'?' if training is None else clock(training + evaluation)} left"

    def _due(self, now: float) -> bool:
        due = not self.quiet and now - self._shown >= (1.0 if self._bar is not None else self.every)
        self._shown = now if due else self._shown
        return due

    def _show(self, words: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, description=printable(words))
        else:
            self.say(f"{100 * self.done / self.total:5.1f} % · {words}")

    def say(self, line: str) -> None:
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(printable(line), highlight=False, markup=False)
        else:
            say(line, err=True)
