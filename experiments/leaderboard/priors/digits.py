"""Does a prior help on the demo's 8×8 digits? DP-Steady from scratch, from priors and on their features, as the demo trains.

python -m experiments.leaderboard.priors.digits choose    # rates, on validation digits; results/digits.csv
python -m experiments.leaderboard.priors.digits judge     # the chosen rates with fresh seeds, on both splits

``choose filters.safetensors`` does the same for another prior at ε = 1. A run takes about four seconds on one core.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

from scipy.stats import t as student

from dpivon import demo
from dpivon.data.images import load_digits
from dpivon.machine import one_thread
from dpivon.methods import METHODS
from dpivon.metrics import accuracy, nll
from dpivon.models import SmallCNN
from dpivon.priors import start_from
from experiments.leaderboard.priors import tables
from experiments.leaderboard.priors.arms import number, paired_interval, table, told
from experiments.strong_privacy.compare.statistics import Interval

TABLE = Path(__file__).parent / "results" / "digits.csv"
EPSILONS, EPOCHS = (0.5, 1.0, 2.0, 4.0), 40
CHOOSING, JUDGING = (0, 1, 2), tuple(range(10, 20))
RATES = {"scratch": (1.75, 2.5, 3.5, 5.0), "strokes-8": (0.3, 0.45, 0.65, 0.9)}
#: The prior's features with a last layer alone, at the method's own rate: nothing was chosen by the scores.
LAST = "strokes-8, last layer"
COLUMNS = ("start", "epsilon", "rate", "seed", "epochs", "split", "accuracy", "nll", "device", "torch", "commit")


def rows(start: str, epsilon: float, rate: float, seed: int, splits: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Scores of one run at its mean."""
    digits, network = load_digits(), None
    given: dict[str, Any] = {"epsilon": epsilon, "delta": demo.DELTA, "epochs": EPOCHS, "seed": seed, "lr": rate}
    parts = {name: getattr(digits, name) for name in ("train", *splits)}
    if start == LAST:
        for name in splits:
            network, parts["train"], parts[name] = demo.on_features(replace(digits, test=getattr(digits, name)))
    elif start != "scratch":
        start_from(network := SmallCNN(), start, input_mean=0.0, input_std=1.0)
    with one_thread():
        run = demo.train(demo.describe("dp-steady"), parts["train"], **given, network=network)
        for name in splits:
            split = parts[name]
            probs = run.learner.predict(split.x, 0).probs
            found = {"accuracy": accuracy(probs, split.y), "nll": nll(probs, split.y)}
            named = start if start == LAST else Path(start).stem
            own = {"start": named, "epsilon": epsilon, "rate": rate, "seed": seed, "epochs": EPOCHS}
            own |= {"split": name} | {n: round(v, 4) for n, v in found.items()}
            yield own | tables.facts(split.x.device)


def at(start: str, epsilon: float, split: str, seeds: Sequence[int]) -> list[tables.Row]:
    """The committed runs."""
    wanted = (start, epsilon, split)
    found = [r for r in tables.read(TABLE) if (r["start"], float(r["epsilon"]), r["split"]) == wanted]
    return [row for row in found if int(row["seed"]) in seeds]


def by_rate(start: str, epsilon: float) -> dict[float, list[tables.Row]]:
    """The runs that rates are chosen by."""
    made = at(start, epsilon, "validation", CHOOSING)
    return {rate: [r for r in made if float(r["rate"]) == rate] for rate in sorted({float(r["rate"]) for r in made})}


def values(runs: Sequence[tables.Row], score: str) -> list[float]:
    return [float(row[score]) for row in runs]


def chosen(start: str, epsilon: float) -> float:
    """The rate with the lowest mean NLL on validation digits; of a last layer alone, the method's own."""
    if start == LAST:
        return METHODS["dp-steady"].lr
    found = by_rate(start, epsilon)
    return min(found, key=lambda rate: fmean(values(found[rate], "nll")))


def unpaired(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Welch's 95 % interval of the difference of two means."""
    parts = [variance(v) / len(v) for v in (a, b)]
    error = sum(parts)
    free = error**2 / sum(part**2 / (len(v) - 1) for part, v in zip(parts, (a, b), strict=True))
    mean, half = fmean(a) - fmean(b), float(student.ppf(0.975, free)) * math.sqrt(error)
    return Interval(mean, mean - half, mean + half, len(a))


def rates() -> str:
    """Every rate that was tried, on validation digits."""
    head = ("start", "ε", "r", "accuracy", "NLL")
    starts = sorted({(row["start"], float(row["epsilon"])) for row in tables.read(TABLE)})
    lines = []
    for start, epsilon in starts:
        for rate, runs in by_rate(start, epsilon).items():
            scores = number(100 * fmean(values(runs, "accuracy")), 1), number(fmean(values(runs, "nll")), 3)
            lines.append((start, f"{epsilon:g}", f"{rate:g}", *scores))
    return table(head, lines)


def judged() -> str:
    """Scratch and prior with the fresh seeds, and their differences."""
    head = ("split", "ε", "score", "trained", "r, scratch", "r, prior", "scratch", "prior", "paired", "unpaired")
    lines = []
    for split in ("validation", "test"):
        for epsilon in EPSILONS:
            for start, what in (("strokes-8", "all weights"), (LAST, "last layer")):
                scratch, prior = (at(own, epsilon, split, JUDGING) for own in ("scratch", start))
                for score, title, digits, factor in (("accuracy", "accuracy", 1, 100.0), ("nll", "NLL", 3, 1.0)):
                    a, b = values(prior, score), values(scratch, score)
                    shown = [
                        f"{number(factor * fmean(v), digits)} ± {number(factor * stdev(v), digits)}" for v in (b, a)
                    ]
                    found = paired_interval(prior, scratch, score, title), unpaired(a, b)
                    used = f"{float(scratch[0]['rate']):g}", f"{float(prior[0]['rate']):g}"
                    differences = [told(each, digits, factor) for each in found]
                    lines.append((split, f"{epsilon:g}", title, what, *used, *shown, *differences))
    return table(head, lines)


def main() -> None:
    plan, priors = sys.argv[1], sys.argv[2:]
    for start in priors or (*RATES, LAST):
        for epsilon in (1.0,) if priors and LAST not in priors else EPSILONS:
            judging = plan == "judge"
            each = (chosen(start, epsilon),) if judging or start == LAST else RATES.get(start, RATES["strokes-8"])
            for rate in each:
                splits = ("validation", "test") if judging else ("validation",)
                made = [
                    r for seed in (JUDGING if judging else CHOOSING) for r in rows(start, epsilon, rate, seed, splits)
                ]
                tables.append(TABLE, made, COLUMNS)


if __name__ == "__main__":
    main()
