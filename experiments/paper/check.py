"""Stacked runs beside the same cells in the ordinary loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpivon.study.results.table import Cells, Row, Value

MEASURES = ("accuracy", "nll", "ece", "mc_accuracy", "mc_nll", "mc_ece")


def distance(a: Value, b: Value) -> float:
    """How many standard errors apart two means are; infinite if they differ and nothing says how much seeds do."""
    error = math.hypot(a.error, b.error)
    gap = abs(a.mean - b.mean)
    return gap / error if error > 0 else 0.0 if gap == 0 else math.inf


def check_page(stacked: Sequence[Row], hooks: Sequence[Row]) -> str:
    """check.md: every cell that both tables have, with the distance in standard errors and the time of a run."""
    ours, theirs = Cells(stacked), Cells(hooks)
    lines = ["# Stacked runs against Opacus's hooks", ""]
    lines += [
        "The same cells in the ordinary loop, one by one, in fp32; other batches and noise. z is the difference of the"
    ]
    lines += ["means in standard errors: with few seeds, values up to 3 or 4 are chance.", ""]
    lines += ["| cell | measure | stacked | hooks | z |", "|---|---|---|---|---|"]
    far = total = 0
    times: list[tuple[float, float]] = []
    for key in ours.keys:
        if key not in theirs.members:
            continue
        method, b, sigma, c = key
        for measure in MEASURES:
            a, z = ours.get(*key, measure), theirs.get(*key, measure)
            if a is None or z is None:
                continue
            apart = distance(a, z)
            total, far = total + 1, far + (apart > 3)
            lines.append(f"| {method}, b = {b}, σ = {sigma:g}, C = {c:g} | {measure} | {a} | {z} | {apart:.1f} |")
        a, z = ours.get(*key, "seconds"), theirs.get(*key, "seconds")
        if a is not None and z is not None:
            times.append((a.mean, z.mean))
    lines += ["", f"{far} of {total} comparisons are more than 3 standard errors apart."]
    if times:
        ratio = sum(z for _, z in times) / sum(a for a, _ in times)
        lines.append(f"A run took {ratio:.1f} times as long on hooks as its share of a stack.")
    return "\n".join(lines) + "\n"
