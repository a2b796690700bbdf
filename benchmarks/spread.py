"""How wide the recipe's posterior is: the widest whose held-out NLL, after the temperature, cannot be told from the lowest.

    python -m benchmarks.spread     # from results/strong-spread-tuning and -small-tuning: results/strong-privacy/spread.md

A score is a mean over cells (b and σ) of means over seeds, its standard error that of the seeds within cells. What is within
one standard error of the difference cannot be told apart. Of those the widest is taken: width is what a prediction has beyond
a temperature, and under shift it pays.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
FOLDERS = ("strong-spread-tuning", "strong-spread-small-tuning")
MEASURES = ("tempered_nll", "tempered_ece", "tempered_accuracy")

Scores = dict[float, dict[tuple[str, str], dict[str, list[float]]]]  # by width, cell and measure, a number a seed


def scores() -> Scores:
    found: Scores = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for folder in FOLDERS:
        with (RESULTS / folder / "tuning.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                cell = row["batch_size"], row["noise_multiplier"]
                for measure in MEASURES:
                    found[json.loads(row["options"])["trace"]][cell][measure].append(float(row[measure]))
    return found


def summary(cells: dict[tuple[str, str], dict[str, list[float]]], measure: str) -> tuple[float, float]:
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
        numbers = [nll[width][0], over, error, *(summary(found[width], m)[0] for m in MEASURES[1:])]
        lines.append(f"| {width:g} | " + " | ".join(f"{x:.4f}" for x in numbers) + " |")
    return max(close), lines


def main() -> None:
    width, lines = choice(scores())
    text = [
        "# How wide: trace by held-out pictures",
        "",
        "    python -m benchmarks.spread",
        "",
        f"From {' and '.join(f'`results/{f}`' for f in FOLDERS)}: seven cells, two or three seeds each.",
        "",
        *lines,
        "",
        f"The widest within one standard error of the lowest NLL is **trace = {width:g}**.",
        "",
    ]
    (RESULTS / "strong-privacy" / "spread.md").write_text("\n".join(text), encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()
