"""How the learning rates in :mod:`dpivon.demo.methods` were chosen: ``python -m dpivon.demo.tune [NAME …]``, about 40
seconds a method.

Only the validation split is looked at.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from statistics import fmean

from dpivon.demo.data import load_digits
from dpivon.demo.methods import CANDIDATES, DELTA, ENTRIES, EPOCHS, EPSILON
from dpivon.demo.run import SAMPLES, predict_with
from dpivon.demo.train import train
from dpivon.metrics import evaluate
from dpivon.threads import one_thread

SEEDS = (101, 102, 103)  # not the demonstration's own


def main() -> None:
    """Print validation scores, averaged over the seeds, for every candidate."""
    digits = load_digits()
    for key in sys.argv[1:] or ENTRIES:
        method = ENTRIES[key]
        for lr in CANDIDATES[key]:
            scores: dict[int, list[dict[str, float]]] = {}
            for seed in SEEDS:
                with one_thread():
                    run = train(
                        replace(method, lr=lr), digits.train, epsilon=EPSILON, delta=DELTA, epochs=EPOCHS, seed=seed
                    )
                for samples in (0, SAMPLES) if method.samples else (0,):
                    probs = predict_with(run, digits.validation, samples, seed)
                    scores.setdefault(samples, []).append(evaluate(probs, digits.validation.y))
            for samples, rows in scores.items():
                mean = {name: fmean(row[name] for row in rows) for name in rows[0]}
                print(
                    f"{method.name:<22} lr {lr:<6g} samples {samples:<3} accuracy {mean['accuracy']:.3f}  "
                    f"NLL {mean['nll']:.3f}  ECE {mean['ece']:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
