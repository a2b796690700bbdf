"""What commands print and write for people: nothing in it that a terminal would obey, or a spreadsheet execute."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self


def printable(text: object) -> str:
    """The text with control characters and invisible ones written as escapes: what a file says must not steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def say(text: object, *, err: bool = False) -> None:
    """Print one line. Every command prints by this, since any of its words may come from a file."""
    print(printable(text), file=sys.stderr if err else sys.stdout, flush=True)


def print_facts(console: Any, facts: Mapping[str, str | Sequence[str]]) -> None:
    """Label and text in two columns, so that long text wraps under itself; of several sentences each on a new line."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for label, text in facts.items():
        grid.add_row(Text(label), Text("\n".join(map(printable, [text] if isinstance(text, str) else text))))
    console.print(grid)


class Bar:
    """Steps, live ε and the time left, on one line of a terminal.

    Args:
        steps: how many there will be.
        epsilon: what is spent now. Some accountants take seconds: they get a twentieth of the time.
        shown: whether there is a bar; None for where stderr is a terminal.
        console: where; stderr if None.
    """

    def __init__(
        self, steps: int, epsilon: Callable[[], float], shown: bool | None = None, console: Any = None
    ) -> None:
        self._epsilon, self._due, self._bar = epsilon, 0.0, None
        if not (sys.stderr.isatty() if shown is None else shown):
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            BarColumn(bar_width=10),  # all of it fits into 80 columns
            TextColumn("{task.completed:.0f}/{task.total:.0f}  ε = {task.fields[epsilon]:.3f}{task.fields[note]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console or Console(stderr=True, highlight=False),
        )
        self._task = self._bar.add_task("", total=steps, epsilon=0.0, note="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def at(self, step: int, **fields: Any) -> None:
        """So many steps are done; ``fields`` may hold ε, where it is known, and a note."""
        if self._bar is None:
            return
        now = time.monotonic()
        if "epsilon" not in fields and now >= self._due:
            fields["epsilon"] = self._epsilon()
            self._due = time.monotonic() + max(0.2, 20 * (time.monotonic() - now))
        self._bar.update(self._task, completed=step, **fields)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Inside, a warning is one line on stderr, when it happens and once."""
    said: set[str] = set()

    def show(message: Any, *args: Any, **options: Any) -> None:
        line = " ".join(str(message).split())
        if line not in said:
            said.add(line)
            say(f"warning: {line}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # the last four as Asian locales write them


def is_formula(text: str) -> bool:
    """Whether a spreadsheet would execute the text instead of showing it. A number is none."""
    if not text.startswith(_STARTS):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


def cell(text: str) -> str:
    """The text, after an apostrophe where a spreadsheet would execute it."""
    return f"'{text}" if is_formula(text) else text
