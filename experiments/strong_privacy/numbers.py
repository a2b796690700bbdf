"""The measured numbers of the pages on strong privacy: functions for the marks of :mod:`experiments.numbers`."""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path
from statistics import fmean

from dpivon.study.results import table
from dpivon.study.results.summary import IVON
from dpivon.study.results.table import Row
from experiments.shown import signed, unsigned, within
from experiments.strong_privacy import attribution, spread
from experiments.strong_privacy.compare.statistics import interval, log_area

RESULTS = Path(__file__).parent / "results"
DEFAULT = '"trace": 0.25'  # in the options of the default's runs


def triples(number: str, scope: str) -> list[str]:
    """The numbers of a bar, each a mean with its interval or a score, for the recipe at its default rate."""
    with (RESULTS / "comparison/bars.csv").open(newline="") as bars:
        wanted = {"contender": "DP-Steady, default rate", "number": number, "scope": scope.replace("_", " ")}
        (row,) = [r for r in csv.DictReader(bars) if all(r[k] == v for k, v in wanted.items())]
    return re.findall(r"[+-]?\d+\.\d+ \[[^]]*\]", row["numbers"])


def bar(number: str, scope: str, digits: str, place: str = "0") -> str:
    """A mean of a bar with its interval, by its place in the row's numbers."""
    mean, low, high = re.findall(r"[+-]?\d+\.\d+", triples(number, scope)[int(place)])
    return f"{signed(float(mean), int(digits))} [{unsigned(float(low), int(digits))}, {unsigned(float(high), int(digits))}]"


def reached(scope: str) -> str:
    """The recipe's accuracy where it is held against published numbers."""
    return triples("4a", scope)[0].split()[0]


def better(scope: str, digits: str, by: str = "test") -> str:
    """The recipe's default against the baseline that is better on the test set, or by validation: points, interval."""
    points, inside = bar("1a", scope, digits, "1" if by == "test" else "0").split(" ", 1)
    return f"{points} points {inside}"


@cache
def rows(study: str) -> list[Row]:
    return table.read(RESULTS / study / "runs.csv")


def shipped(row: Row) -> float:
    """Accuracy as a method predicts: averaged over draws, where it has any."""
    found = row["accuracy"] if row["mc_accuracy"] is None else row["mc_accuracy"]
    return 100 * float(found)


def default(study: str, method: str) -> list[Row]:
    """Rows of a method, of the recipe those of its default."""
    return [r for r in rows(study) if r["method"] == method and (method != "dp-steady" or DEFAULT in r["options"])]


def ivon(sigma: str) -> str:
    """DP-IVON-Gradsq less DP-SGD at one σ, both tuned, averaged and tempered: points and NLL, paired by seed."""
    ours, theirs = (
        {r["seed"]: r for r in default("strong-epsilon", m) if r["noise_multiplier"] == float(sigma)}
        for m in (IVON, "dp-sgd")
    )
    points = interval([100 * (ours[s]["tempered_accuracy"] - theirs[s]["tempered_accuracy"]) for s in sorted(ours)])
    losses = interval([ours[s]["tempered_nll"] - theirs[s]["tempered_nll"] for s in sorted(ours)])
    return f"{within(points, 1)} points and {within(losses, 3)} of NLL"


def beside(sigma: str, column: str, digits: str) -> str:
    """DP-IVON-Gradsq less the recipe at one σ: points as both predict, or a score."""
    ours, theirs = (
        {r["seed"]: r for r in default("strong-epsilon", m) if r["noise_multiplier"] == float(sigma)}
        for m in (IVON, "dp-steady")
    )
    value = shipped if column == "accuracy" else lambda r: float(r[column])
    return within(interval([value(ours[s]) - value(theirs[s]) for s in sorted(ours)]), int(digits))


def area(rival: str, digits: str, most: str = "inf") -> str:
    """The recipe less a rival at the paper's σ: accuracy over log ε up to some ε, its mean over that axis."""
    curves = [
        {(r["seed"], r["epsilon"]): shipped(r) for r in default("strong-paper", m) if r["epsilon"] < float(most)}
        for m in ("dp-steady", rival)
    ]
    found = []
    for seed in sorted({s for s, _ in curves[0]}):
        epsilons = sorted(e for s, e in curves[0] if s == seed)
        ours, theirs = (log_area(epsilons, [curve[seed, e] for e in epsilons]) for curve in curves)
        found.append(ours - theirs)
    return within(interval(found), int(digits))


def width(column: str, digits: str) -> str:
    """What trace = .25 adds to a tempered score on the test sets, from the page on width."""
    found = spread.differences(spread.scores(spread.FINAL, "runs.csv"), 0.25, column)
    return unsigned(abs(fmean(fmean(cell) for cell in found)), int(digits))


def attributed(digits: str = "1") -> str:
    """The recipe less the better baseline on the test set, which has averaged iterates and a rate per σ: points."""
    return f"{within(attribution.points(RESULTS), int(digits))} points"
