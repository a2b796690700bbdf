"""Does a prior help on the demo's 8×8 digits? DP-Steady at ε = 1 from scratch and from a prior, scored on validation digits.

dpivon prior learn --network small --side 8 --channels 1 --seconds 100 --batch 256 --pool 16384 --out digits.safetensors
python -m experiments.leaderboard.priors.digits digits.safetensors    # about three minutes on one core; results/digits.csv
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

from dpivon import demo
from dpivon.data.images import load_digits
from dpivon.machine import one_thread
from dpivon.metrics import accuracy, nll
from dpivon.models import SmallCNN
from dpivon.priors import start_from
from experiments.leaderboard.priors import tables

EPSILON, SEEDS, EPOCHS = 1.0, (0, 1, 2), 40
RATES = {"scratch": (1.75, 3.5, 7.0), "prior": (0.45, 0.9, 1.75)}
COLUMNS = ("start", "epsilon", "rate", "seed", "epochs", "accuracy", "nll", "device", "torch", "commit")


def main() -> None:
    prior, digits = sys.argv[1], load_digits()

    def begun() -> SmallCNN:
        network = SmallCNN()
        start_from(network, prior, input_mean=0.0, input_std=1.0)
        return network

    for start, rates in RATES.items():
        for rate in rates:
            rows = []
            for seed in SEEDS:
                with one_thread(), patch.object(demo, "SmallCNN", SmallCNN if start == "scratch" else begun):
                    method = demo.describe("dp-steady")
                    given = {"epsilon": EPSILON, "delta": demo.DELTA, "epochs": EPOCHS, "seed": seed, "lr": rate}
                    run = demo.train(method, digits.train, **given)
                    probs = run.learner.predict(digits.validation.x, 0).probs
                found = {"accuracy": accuracy(probs, digits.validation.y), "nll": nll(probs, digits.validation.y)}
                own = {"start": start, "epsilon": EPSILON, "rate": rate, "seed": seed, "epochs": EPOCHS}
                rows.append(own | {n: round(v, 4) for n, v in found.items()} | tables.facts(digits.train.x.device))
            tables.append(Path(__file__).parent / "results" / "digits.csv", rows, COLUMNS)


if __name__ == "__main__":
    main()
