"""How wide the recipe's posterior is: the widest whose held-out NLL, tempered, is not distinguishable from the lowest.

    python -m experiments.strong_privacy.spread     # from strong-spread-tuning and -small-tuning: spread.md

A score is a mean over cells of means over seeds, its standard error that of the seeds within cells. What is within
one standard error of the difference is not distinguishable. Of those the widest is taken: width is what a prediction has beyond
a temperature. That it pays under shift is a hint of one run.

What the final studies say of the same widths on their test sets stands beside it, and chooses nothing.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpivon.study.results import table
from experiments.strong_privacy.compare.statistics import interval

RESULTS = Path(__file__).parent / "results"
FOLDERS = ("strong-spread-tuning", "strong-spread-small-tuning")
FINAL = ("strong-epsilon", "strong-paper", "strong-fashion")
MEASURES = ("tempered_nll", "tempered_ece", "tempered_accuracy")

CELL = ("dataset", "network", "batch_size", "noise_multiplier", "max_grad_norm", "lr")
Cell = tuple[Any, ...]
Scores = dict[float, dict[Cell, dict[str, list[float]]]]  # by width, cell and measure, a number a seed


def scores(folders: Sequence[str] = FOLDERS, name: str = "tuning.csv") -> Scores:
    """Of DP-Steady, seeds in order."""
    found: Scores = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for folder in folders:
        rows = [row for row in table.read(RESULTS / folder / name) if row["method"] == "dp-steady"]
        for row in sorted(rows, key=lambda row: row["seed"]):
            cell = tuple(row[column] for column in CELL)
            for measure in MEASURES:
                found[json.loads(row["options"])["trace"]][cell][measure].append(row[measure])
    return found


def summary(cells: dict[Cell, dict[str, list[float]]], measure: str) -> tuple[float, float]:
    """Mean over cells, and its standard error."""
    each = [values[measure] for values in cells.values()]
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in each)) / len(each)
    return statistics.mean(statistics.mean(values) for values in each), error


def choice(found: Scores) -> tuple[float, list[str]]:
    """The width, and the table that it follows from."""
    nll = {width: summary(cells, "tempered_nll") for width, cells in found.items()}
    best = min(nll, key=lambda width: nll[width][0])
    lines = [
        "| trace | NLL, tempered | over the lowest | standard error of that | ECE, tempered | accuracy |",
        "|---" * 6 + "|",
    ]
    close = []
    for width in sorted(found):
        over, error = nll[width][0] - nll[best][0], math.hypot(nll[width][1], nll[best][1])
        close += [width] if over <= error else []
        from_best = ["", ""] if width == best else [f"{over:.4f}", f"{error:.4f}"]
        others = [f"{summary(found[width], m)[0]:.4f}" for m in MEASURES[1:]]
        lines.append(" | ".join([f"| {width:g}", f"{nll[width][0]:.4f}", *from_best, *others]) + " |")
    return max(close), lines


def differences(found: Scores, width: float, measure: str) -> list[list[float]]:
    """From no width, cell by cell, a number a repetition."""
    narrow = found[0.0]
    return [
        [a - b for a, b in zip(values[measure], narrow[cell][measure], strict=True)]
        for cell, values in found[width].items()
    ]


def on_the_test_set(found: Scores) -> list[str]:
    """Less the same without width: mean over cells, its 95 % interval over repetitions, and in how many cells it is lower."""
    lines = ["| trace, less none | NLL, tempered | ECE, tempered | accuracy |", "|---" * 4 + "|"]
    for width in sorted(found):
        if width > 0:
            shown = []
            for measure in MEASURES:
                cells = differences(found, width, measure)
                i = interval([statistics.mean(seed) for seed in zip(*cells, strict=True)])
                lower = sum(statistics.mean(cell) < 0 for cell in cells)
                shown.append(f"{i.mean:+.4f} [{i.low:+.4f}, {i.high:+.4f}], lower in {lower} of {len(cells)}")
            lines.append(f"| {width:g} | " + " | ".join(shown) + " |")
    return lines


def counted(found: Scores) -> str:
    cells = next(iter(found.values()))
    seeds = sorted({len(values["tempered_nll"]) for each in found.values() for values in each.values()})
    return f"{len(cells)} cells, {' or '.join(map(str, seeds))} repetitions each"


def report(out: Path = RESULTS) -> list[Path]:
    tuned, final = scores(), scores(FINAL, "runs.csv")
    width, lines = choice(tuned)
    text = [
        "# How wide: trace by held-out images",
        "",
        "    python -m experiments.strong_privacy.spread",
        "",
        f"From {' and '.join(f'`{f}`' for f in FOLDERS)}: {counted(tuned)}.",
        "",
        *lines,
        "",
        f"The widest within one standard error of the lowest NLL is **trace = {width:g}**.",
        "",
        "## On the test sets, which chose nothing",
        "",
        f"From {', '.join(f'`{f}`' for f in FINAL)}: {counted(final)}, each with noise of its own.",
        "",
        *on_the_test_set(final),
        "",
    ]
    (out / "spread.md").write_text("\n".join(text), encoding="utf-8")
    return [out / "spread.md"]


if __name__ == "__main__":
    report()
