"""What commands print: one line at a time, and nothing in it that a terminal would obey."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


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
