"""What commands say besides their answer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Inside, a warning is one line on stderr, when it happens and once."""
    said: set[str] = set()

    def say(message: Any, *args: Any, **options: Any) -> None:
        line = " ".join(str(message).split())
        if line not in said:
            said.add(line)
            typer.echo(f"warning: {line}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = say
        yield
