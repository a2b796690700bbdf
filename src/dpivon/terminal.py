"""What commands print: one line at a time, and nothing in it that a terminal would obey."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def printable(text: object) -> str:
    """The text with control characters and invisible ones written as escapes: what a file says must not steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def say(text: object, *, err: bool = False) -> None:
    """Print one line. Every command prints by this, since any of its words may come from a file."""
    print(printable(text), file=sys.stderr if err else sys.stdout, flush=True)


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
