"""Numbers as pages have them: a sign that is not a hyphen, an interval in brackets."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.strong_privacy.compare.statistics import Interval


def signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def unsigned(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def within(i: Interval, digits: int) -> str:
    return f"{signed(i.mean, digits)} [{unsigned(i.low, digits)}, {unsigned(i.high, digits)}]"


def ends(values: Sequence[float], digits: int) -> str:
    return f"{unsigned(min(values), digits)} – {unsigned(max(values), digits)}"


def lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = ["| " + " | ".join(r) + " |" for r in (head, *body)]
    return "\n\n" + "\n".join([rows[0], "|" + "---|" * len(head), *rows[1:]]).replace("|  |", "| |") + "\n\n"
