"""The owner's look at the rows before any ε is spent: what does not look as it was declared.

None of it is private, and none of it is kept: it is shown to the owner of the data, or stops the command. Nothing that is
trained, written or published depends on it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpivon.errors import ArgumentError
from dpivon.sources.columns import Array, Categorical, Column, Date, is_missing, label

FEW = 20  # rows: of fewer a share says little
UNREADABLE, DISTINCT, SIZE = 0.1, 0.9, 0.1  # shares from which on a column or N does not look as declared
NOT_PRIVATE = (
    "This look at the rows is not private: it is for their owner only, and nothing of it goes into the model or the "
    "published folder"
)
_ID = re.compile(r"(^|[^a-z])(id|ids|uuid|guid|pid|mrn)([^a-z]|$)")


@dataclass(frozen=True)
class Finding:
    """What a column looks like; ``problem`` says what is wrong with it, if anything is."""

    line: str
    problem: str = ""


def look_at_column(name: str, column: Column, cells: Sequence[Any], other_mark: str, learning: bool) -> Finding:
    """One column. ``other_mark`` is the decimal mark that is not declared; identifiers matter for ``learning`` only."""
    n, missing = len(cells), np.fromiter((is_missing(cell) for cell in cells), dtype=bool, count=len(cells))
    there = [cell for cell, gone in zip(cells, missing, strict=True) if not gone]
    problem = f"all {n} cells are missing" if n >= FEW and not there else ""
    if isinstance(column, Categorical):
        odd = sum(column.slot(cell) == len(column.categories) for cell in cells)
        words = f"{odd} other than its categories"
        if n >= FEW and odd > n / 2:
            problem = f"{odd} of {n} values are none of its categories"
        identifies = True
    else:
        values = column.values(cells)
        unread = np.isnan(values) & ~missing
        low, high = column.range
        clamped = int(((values < low) | (values > high)).sum())
        what = "dates" if isinstance(column, Date) else "numbers"
        words = f"{clamped} clamped, {unread.sum()} that are no {what}"
        if n >= FEW and clamped > n / 2:
            problem = f"{clamped} of {n} values are outside {column.describe()}"
        if unread.sum() > UNREADABLE * len(there):
            problem = f"{unread.sum()} of {len(there)} cells are no {what}" + _mark(cells, unread, other_mark)
        counted = n > 1 and bool((np.diff(values) == 1).all())
        identifies = what == "numbers" and (counted or (named_like_an_id(name) and _whole(values[~missing])))
    if learning and identifies and len(there) >= FEW and len(set(map(label, there))) > DISTINCT * len(there):
        problem = "looks like an identifier, with another value in nearly every row: name it under id or ignore"
    line = f"{name}: {words}, {missing.sum()} missing, of {n}"
    return Finding(line, f"{name}: {problem}" if problem else "")


def _mark(cells: Sequence[Any], unread: Array, other_mark: str) -> str:
    """A hint if most of the unreadable cells would be numbers with the other decimal mark."""
    with_it = re.compile(r"\s*[+-]?\d*,\d+\s*$")  # as a comma, whichever is declared: cells have points by now
    found = sum(bool(with_it.match(str(cells[i]))) for i in np.flatnonzero(unread).tolist())
    return (
        f", most of them with a decimal {other_mark!r}: declare decimal: {other_mark!r}"
        if 2 * found > unread.sum()
        else ""
    )


def named_like_an_id(name: str) -> bool:
    """Whether ``id`` or the like is a word of the name: patient_id, PatientId, MRN."""
    return bool(_ID.search(re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()))


def _whole(values: Array) -> bool:
    return bool((np.isfinite(values) & (values == np.round(values))).all())


def look_at_size(count: int, declared: int, what: str = "examples") -> Finding:
    """Whether the declared N is within a tenth of what there is."""
    line = f"{count} {what}; N = {declared} is declared"
    far = abs(count - declared) > SIZE * declared
    return Finding(line, f"dataset_size: N = {declared} is declared, and there are {count} {what}" if far else "")


def stop_at(name: str, where: str, findings: Sequence[Finding]) -> None:
    """Stop if anything was found to be wrong: the owner may correct it, or say that it is meant so."""
    found = [finding.problem for finding in findings if finding.problem]
    if not found:
        return
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    raise ArgumentError(
        f"{name}={where!r}: does not look as declared: {'; '.join(found[:5])}{more}. {NOT_PRIVATE}, and no ε was spent. "
        "Correct the declaration or the file (`dpivon train --check` shows every column), or go on with --proceed."
    )
