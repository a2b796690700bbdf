"""What a reader must know before believing the verdicts: said by the tables themselves."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.strong_privacy.compare.cell import Contender
from experiments.strong_privacy.compare.field import TEMPERED, Entry, Field
from experiments.strong_privacy.compare.scopes import Scope


def remarks(field: Field, where: Sequence[Scope]) -> list[str]:
    """Equal effort, edges of the candidates, what diverged, what is missing, and which scopes hold nothing."""
    entries = [entry for cell in field.cells for entry in field.entries[cell].values()]
    out = [_effort(field), *_edges(field), *_lost(field, entries), *_temperatures(field, entries)]
    empty = [scope.title for scope in where if not scope.cells]
    if empty:
        out.append("Not measured at all: " + "; ".join(empty) + ".")
    return out


def _effort(field: Field) -> str:
    """The same number of learning rates for every method, cell by cell: ours, if it is tuned there, and the baselines'."""
    judged = {Contender(field.ours), *map(Contender, field.baselines)}
    unequal, numbers, tuned = [], set(), 0
    for cell in field.cells:
        counts = {c: e.candidates for c, e in field.entries[cell].items() if c in judged}
        if not any(counts.values()):
            continue
        tuned += 1
        numbers |= set(counts.values())
        if len(set(counts.values())) > 1:
            named = ", ".join(f"{c.title} {n}" for c, n in sorted(counts.items()))
            unequal.append(f"{cell.label}: {named}")
    if not tuned:
        return "No cell has validation data of its own: every rate is the only one that its table holds."
    if unequal:
        return "**Unequal tuning effort**: the learning rates tried differ in number. " + "; ".join(unequal) + "."
    left = len(field.cells) - tuned
    rest = f"; the other {left} have no validation data of their own" if left else ""
    return (
        f"Equal numbers of candidates, checked: {_listed(numbers)} learning rates for every method "
        f"in each of {tuned} cells{rest}. "
        "A default has no candidates in these cells; the runs that set it are not counted."
    )


def _edges(field: Field) -> list[str]:
    """A winner at the end of its candidates says that the optimum may lie outside."""
    out = []
    for contender in field.contenders:
        found = [
            e for cell in field.cells if (e := field.entries[cell].get(contender)) is not None and e.candidates > 1
        ]
        at_edge = sum(entry.at_edge for entry in found)
        if at_edge:
            out.append(
                f"{contender.title}: the rate chosen is the largest or smallest of its candidates in {at_edge} of {len(found)} "
                "cells; better ones may lie outside."
            )
    return out


def _lost(field: Field, entries: Sequence[Entry]) -> list[str]:
    out = [
        f"**Not finished**: `{name}` has {done} of {planned} runs."
        for name, (done, planned) in field.unfinished.items()
    ]
    for entry in entries:
        who = f"{entry.contender.title} at {entry.cell.label}"
        if entry.diverged:
            runs = _listed(entry.diverged)
            out.append(f"**Diverged**: {who}, repetition {runs}. Counted as guessing, or as the worst run of the cell.")
        if entry.missing:
            ours = entry.contender.method == field.ours
            how = "Counted as guessing, or as the worst run of the cell" if ours else "Left out of the pairs"
            out.append(f"**Missing**: {who}, repetition {_listed(entry.missing)}. {how}.")
    gone = [cell.label for cell in field.cells if not any(c.method == field.ours for c in field.entries[cell])]
    if gone:
        out.append(f"Cells without {Contender(field.ours).title}, which are in no comparison: " + "; ".join(gone) + ".")
    return out


def _temperatures(field: Field, entries: Sequence[Entry]) -> list[str]:
    without: dict[str, int] = {}
    for entry in entries:
        if entry.rows and field.scores(entry, TEMPERED, "nll") is None:
            without[entry.contender.title] = without.get(entry.contender.title, 0) + 1
    named = ", ".join(f"{title} in {n} cells" for title, n in without.items())
    return [f"Without a private temperature, so compared raw only: {named}."] if named else []


def _listed(numbers: Sequence[int] | set[int]) -> str:
    return ", ".join(str(n) for n in sorted(numbers))
