"""What was released: rows of (noise multiplier σ, sampling rate q, number of steps)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dpivon.errors import bad, check_number, check_whole

Entry = tuple[float, float, int]
History = list[Entry]


def check_entry(noise_multiplier: Any, sample_rate: Any, steps: Any) -> Entry:
    """One row of a history: σ ≥ 0 and finite, q in (0, 1], whole steps ≥ 0."""
    return (
        check_number("noise_multiplier", noise_multiplier, "Give a finite noise multiplier of 0 or more", at_least=0.0),
        check_number(
            "sample_rate",
            sample_rate,
            "Give the probability that a record is in a batch, batch_size / dataset_size",
            above=0.0,
            at_most=1.0,
        ),
        check_whole("steps", steps, "Give the number of releases as a whole number of 0 or more"),
    )


def check_history(history: Any) -> History:
    """Every row checked; lists (as JSON stores them) become tuples."""
    fix = "Give a list of (noise_multiplier, sample_rate, steps)"
    if isinstance(history, str) or not isinstance(history, Iterable):
        raise bad("history", history, "is not a list of rows", fix)
    rows: History = []
    for row in history:
        if isinstance(row, str) or not isinstance(row, Sequence) or len(row) != 3:
            raise bad("history", row, "holds a row that is not a triple", fix)
        rows.append(check_entry(*row))
    return rows


def merged(history: Any) -> dict[tuple[float, float], int]:
    """Steps per distinct (σ, q).

    Composition does not depend on the order of the releases, so equal rows add up: a history of a million
    steps with few distinct rows costs no more than one of a few steps.
    """
    steps_of: dict[tuple[float, float], int] = {}
    for sigma, rate, steps in check_history(history):
        if steps:
            steps_of[sigma, rate] = steps_of.get((sigma, rate), 0) + steps
    return steps_of


def append(history: History, entry: Entry) -> None:
    """Add a row, run-length: it lengthens the last row when σ and q are the same."""
    sigma, rate, steps = entry
    if history and history[-1][:2] == (sigma, rate):
        history[-1] = (sigma, rate, history[-1][2] + steps)
    elif steps:
        history.append(entry)
