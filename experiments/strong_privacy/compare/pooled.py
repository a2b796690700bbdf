"""Paired differences of several cells as one number, and areas under accuracy over log ε.

Repetitions are the unit of chance: what several cells say in one repetition is averaged first, since they begin at the same
weights. Only repetitions that every cell has are used.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.strong_privacy.compare.cell import Cell, Contender, Setting
from experiments.strong_privacy.compare.field import RAW, Entry, Field
from experiments.strong_privacy.compare.statistics import log_area

Differences = dict[int, float]  # by repetition


def pooled(cells: Sequence[Differences]) -> list[float]:
    """The mean over cells, repetition by repetition."""
    common = set.intersection(*(set(found) for found in cells)) if cells else set()
    return [sum(found[seed] for found in cells) / len(cells) for seed in sorted(common)]


def kept(cells: Sequence[Differences]) -> str:
    """In words, how many repetitions that leaves, where it is not all of them."""
    most, common = max((len(found) for found in cells), default=0), len(pooled(cells))
    return f"over the {common} of {most} repetitions that every cell has" if common < most else ""


def curves(cells: Sequence[Cell]) -> dict[Setting, list[Cell]]:
    """Cells by setting, where there are two or more: those have an area."""
    out: dict[Setting, list[Cell]] = {}
    for cell in cells:
        out.setdefault(cell.setting, []).append(cell)
    return {setting: members for setting, members in out.items() if len(members) > 1}


def areas(field: Field, cells: Sequence[Cell], contender: Contender) -> Differences | None:
    """A contender's area under raw accuracy against log ε of training, in every repetition; None if it has a gap."""
    found = []
    for cell in cells:
        entry = field.entries[cell].get(contender)
        scores = None if entry is None else field.scores(entry, RAW, "accuracy")
        if scores is None:
            return None
        found.append(scores)
    common = set.intersection(*(set(scores) for scores in found))
    epsilons = [field.epsilon(cell) for cell in cells]
    return {seed: log_area(epsilons, [scores[seed] for scores in found]) for seed in sorted(common)} or None


def begun(field: Field, cells: Sequence[Cell], ours: Contender) -> list[list[Cell]]:
    """The curves of settings in which ours ran at all; a setting that was left out as a whole is not a gap in a curve."""
    return [members for members in curves(cells).values() if met_by(field, members, ours)]


def area_difference(field: Field, cells: Sequence[Cell], ours: Contender, theirs: Contender) -> list[float] | None:
    """Ours less theirs, repetition by repetition, averaged over the settings that ours began; None if one has a gap."""
    parts = []
    for members in begun(field, cells, ours):
        a, b = areas(field, members, ours), areas(field, members, theirs)
        if a is None or b is None:
            return None
        parts.append({seed: a[seed] - b[seed] for seed in a if seed in b})
    return pooled(parts) or None


def against_best(field: Field, ours: Contender, cell: Cell, kind: str, measure: str) -> Differences | None:
    """Ours less the baseline that validation data prefer."""
    entry, best = field.entries[cell].get(ours), field.best(cell, measure)
    return None if entry is None or best is None else field.differences(entry, best[0], kind, measure)


def met_by(field: Field, cells: Sequence[Cell], ours: Contender) -> list[tuple[Cell, Entry]]:
    """Where ours ran."""
    return [(cell, entry) for cell in cells if (entry := field.entries[cell].get(ours)) is not None]
