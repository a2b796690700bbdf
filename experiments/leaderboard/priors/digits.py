"""Does a prior help on the demo's 8×8 digits? DP-Steady from scratch and from priors, with the demo's training.

python -m experiments.leaderboard.priors.digits choose    # rates, on validation digits; results/digits.csv
python -m experiments.leaderboard.priors.digits judge     # the chosen rates with fresh seeds, on both splits

``choose filters.safetensors`` does the same for another prior at ε = 1. A run takes about four seconds on one core.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpivon import demo
from dpivon.data.images import load_digits
from dpivon.machine import one_thread
from dpivon.metrics import accuracy, nll
from experiments.leaderboard.priors import tables

TABLE = Path(__file__).parent / "results" / "digits.csv"
EPSILONS, EPOCHS = (0.5, 1.0, 2.0, 4.0), 40
CHOOSING, JUDGING = (0, 1, 2), tuple(range(10, 20))
RATES = {"scratch": (1.75, 2.5, 3.5, 5.0), "strokes-8": (0.3, 0.45, 0.65, 0.9)}
COLUMNS = ("start", "epsilon", "rate", "seed", "epochs", "split", "accuracy", "nll", "device", "torch", "commit")


def rows(start: str, epsilon: float, rate: float, seed: int, splits: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Scores of one run at its mean."""
    digits, prior = load_digits(), "" if start == "scratch" else start
    given = {"epsilon": epsilon, "delta": demo.DELTA, "epochs": EPOCHS, "seed": seed, "lr": rate, "start": prior}
    with one_thread():
        run = demo.train(demo.describe("dp-steady"), digits.train, **given)
        for name in splits:
            split = getattr(digits, name)
            probs = run.learner.predict(split.x, 0).probs
            found = {"accuracy": accuracy(probs, split.y), "nll": nll(probs, split.y)}
            own = {"start": Path(start).stem, "epsilon": epsilon, "rate": rate, "seed": seed, "epochs": EPOCHS}
            own |= {"split": name} | {n: round(v, 4) for n, v in found.items()}
            yield own | tables.facts(split.x.device)


def chosen(start: str, epsilon: float) -> float:
    """The rate with the lowest mean NLL on validation digits over the seeds for choosing."""
    found: dict[float, list[float]] = {}
    for row in tables.read(TABLE):
        place = (row["start"], float(row["epsilon"]), row["split"], int(row["seed"]) in CHOOSING)
        if place == (start, epsilon, "validation", True):
            found.setdefault(float(row["rate"]), []).append(float(row["nll"]))
    return min(found, key=lambda rate: statistics.fmean(found[rate]))


def judged(start: str, epsilon: float, split: str, score: str) -> list[float]:
    """Of the fresh seeds, in their order."""
    at = [r for r in tables.read(TABLE) if (r["start"], float(r["epsilon"]), r["split"]) == (start, epsilon, split)]
    return [float(r[score]) for seed in JUDGING for r in at if int(r["seed"]) == seed]


def main() -> None:
    plan, priors = sys.argv[1], sys.argv[2:]
    for start in priors or RATES:
        for epsilon in (1.0,) if priors else EPSILONS:
            judging = plan == "judge"
            rates = (chosen(start, epsilon),) if judging else RATES.get(start, RATES["strokes-8"])
            for rate in rates:
                splits = ("validation", "test") if judging else ("validation",)
                made = [
                    r for seed in (JUDGING if judging else CHOOSING) for r in rows(start, epsilon, rate, seed, splits)
                ]
                tables.append(TABLE, made, COLUMNS)


if __name__ == "__main__":
    main()
