"""Where the numbers of a page come from: how many runs, on what, how long, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from dpivon.study.plan.plan import Plan, PlannedRun
from dpivon.study.results.table import Row, check_code, title_of


def provenance(rows: Sequence[Row], plan: Plan | None) -> str:
    """In a few sentences, for the head of a page."""
    hardware = " and ".join(sorted({f"{row['hardware']}, torch {row['torch']}" for row in rows}))
    minutes = sum(row["seconds"] or 0.0 for row in rows) / 60
    words = (
        f"{len(rows)} runs, {_seeds(rows)} (± is their standard deviation), trained in "
        f"{minutes:.1f} minutes by the clock on {hardware}. `study.json` is the plan, every run by its numbers: "
        f"`dpivon study run study.json --out NEW` repeats it. {check_code(rows, mixed=True)}"
    )
    return f"{words} {lacking}" if (lacking := _lacking(rows, plan)) else words


def _seeds(rows: Sequence[Row]) -> str:
    """How many a cell has, by method where they differ."""
    by_number: dict[int, list[str]] = {}
    for method in sorted({row["method"] for row in rows}):
        by_number.setdefault(len({row["seed"] for row in rows if row["method"] == method}), []).append(method)
    parts = [
        f"{n} seed{'s' if n > 1 else ''} a cell{' of ' + ' and '.join(map(title_of, named)) if len(by_number) > 1 else ''}"
        for n, named in sorted(by_number.items())
    ]
    return ", ".join(parts)


def _lacking(rows: Sequence[Row], plan: Plan | None) -> str:
    """Which of the plan's runs are not in the table, by what tells them apart from those that are."""
    if plan is None:
        return ""
    there = {row["id"] for row in rows}
    absent = [run for run in plan.runs if run.id not in there]
    if not absent:
        return ""
    present = [run for run in plan.runs if run.id in there]
    where = [text for text in (_axis(absent, present, *axis) for axis in _AXES) if text]
    return (
        f"**{len(absent)} of {len(plan.runs)} planned runs are missing{': all with ' + ', '.join(where) if where else ''}.** "
        "What is said below is said without them."
    )


_AXES = (("method", "method"), ("batch_size", "b"), ("noise_multiplier", "σ"), ("max_grad_norm", "C"), ("seed", "seed"))


def _axis(absent: Sequence[PlannedRun], present: Sequence[PlannedRun], name: str, sign: str) -> str:
    """ "b = 128" where all absent runs have values that no present one has."""
    mine, others = ({getattr(run, name) for run in runs} for runs in (absent, present))
    return "" if mine & others else f"{sign} = {' or '.join(str(v) for v in sorted(mine))}"
