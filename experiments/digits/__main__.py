"""What the documentation says of the digits: the demo's methods, iterate averaging, and ensembles, at one budget.

    python -m experiments.digits      # ε = 4, δ = 1e-4, 40 epochs, b = 256, C = 1: results/rows.csv; what has rows is left out

- ``demo``: `dpivon demo` with six methods and five seeds, on the 300 test digits;
- ``ema``: the last iterate and the averaged ones of the same runs, three seeds, on the validation digits;
- ``ensemble``: K members of DP-Adam whose *joint* ε is the stated one, so each member has more noise; the same digits.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import dpivon
from dpivon.data import load_digits
from dpivon.demo import BATCH_SIZE, DELTA, EPOCHS, EPSILON, MAX_GRAD_NORM, OPTIONS, run_demo, train
from dpivon.demo import METHODS as METHODS_SHOWN
from dpivon.methods import METHODS
from dpivon.metrics import evaluate
from dpivon.models import SmallCNN
from dpivon.privacy.accounting import epsilon
from dpivon.stacked import AnyNetwork, Ensemble, Run, ensemble_noise
from dpivon.study.results.table import code, commit
from experiments.leaderboard.priors import tables

RESULTS = Path(__file__).parent / "results" / "rows.csv"
SEEDS, DECAY = (101, 102, 103), 0.95
DEMO = (*METHODS_SHOWN, "dp-adambc", "dp-psgld")
AVERAGED = ("dp-sgd", "dp-adam", "dp-adambc", "dp-ivon-gradsq")
SCORES = ("accuracy", "nll", "ece", "brier")
ROW = ("part", "method", "way", "seed", "epsilon", "noise_multiplier", *SCORES, "device", "torch", "commit", "code")
Rows = list[dict[str, Any]]


def demo(seed: int) -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        made = run_demo(Path(folder) / "out", seed=seed, methods=DEMO, quiet=True)
    return [asdict(result) | {"way": result.prediction} for result in made]


def ema(seed: int) -> Rows:
    """Scores of the last iterate's and of the averaged iterates' predictions, from the same runs."""
    digits, found = load_digits(), []
    for key in AVERAGED:
        run = train(METHODS[key], digits.train, epsilon=EPSILON, delta=DELTA, epochs=EPOCHS, seed=seed, ema=DECAY)
        learner, average = run.learner, run.learner.average
        for way, kept in (("last", None), ("average", average)):
            learner.average = kept
            probs = learner.predict(digits.validation.x, generator=torch.Generator().manual_seed(seed)).probs
            facts = {"method": run.method.title, "way": way, "seed": seed, "epsilon": run.epsilon}
            found.append(facts | {"noise_multiplier": run.noise_multiplier} | evaluate(probs, digits.validation.y))
    return found


def ensemble(seed: int) -> Rows:
    """Ensembles whose joint ε is the budget; one member is a single run. ``epsilon`` is that of one member."""
    digits, found, key = load_digits(), [], "dp-adam"
    n = len(digits.train)
    steps = EPOCHS * math.ceil(n / BATCH_SIZE)
    for members in (1, 2, 5):
        facts: dict[str, Any] = {"delta": DELTA, "dataset_size": n, "batch_size": BATCH_SIZE, "steps": steps}
        sigma = ensemble_noise(members, target_epsilon=EPSILON, **facts)
        own = epsilon([(sigma, BATCH_SIZE / n, steps)], DELTA, "pld")
        run = Run(key, 0, sigma, MAX_GRAD_NORM, METHODS[key].lr, BATCH_SIZE, OPTIONS.get(key, {}))
        seeds = range(100 * seed, 100 * seed + max(members, 2))
        made = Ensemble(run, seeds, AnyNetwork(SmallCNN), digits.train.x, digits.train.y)
        for _ in made.train(steps):
            pass
        one = (made.stack.model(0), made.stack.posterior(0), digits.validation.x)
        probs = (dpivon.predict(*one) if members == 1 else made.predict(digits.validation.x)).probs
        row = {"method": METHODS[key].title, "way": members, "seed": seed, "epsilon": own}
        found.append(row | {"noise_multiplier": sigma} | evaluate(probs, digits.validation.y))
    return found


PARTS: dict[str, tuple[Callable[[int], Rows], Sequence[int]]] = {
    "demo": (demo, range(5)),
    "ema": (ema, SEEDS),
    "ensemble": (ensemble, SEEDS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=RESULTS)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    a = parser.parse_args()
    torch.set_num_threads(1)
    about = {"device": "CPU", "torch": torch.__version__, "commit": commit(), "code": code()}
    for part, seed in ((name, s) for name in a.parts for s in PARTS[name][1]):
        if (part, str(seed)) not in {(row["part"], row["seed"]) for row in tables.read(a.table)}:
            rows = [row | about | {"part": part} for row in PARTS[part][0](seed)]
            shown = [{k: round(v, 6) if isinstance(v := r.get(k, ""), float) else v for k in ROW} for r in rows]
            tables.append(a.table, shown, ROW)


if __name__ == "__main__":
    main()
