"""What iterate averaging and ensembling do on the demonstration's digits, at one budget.

    python -m benchmarks.baselines                 # ε = 4, δ = 1e-4, 40 epochs, b = 256, C = 1; validation digits, three seeds

An ensemble of K spends the budget on all K members together: its joint ε is the stated one, so each member has more noise.
"""

from __future__ import annotations

import argparse
import math
from statistics import fmean

import torch

import dpivon
from dpivon.data import load_digits
from dpivon.demo import BATCH_SIZE, DELTA, EPOCHS, EPSILON, MAX_GRAD_NORM, OPTIONS, train
from dpivon.methods import METHODS
from dpivon.metrics import evaluate
from dpivon.models import SmallCNN
from dpivon.stacked import AnyNetwork, Ensemble, Run, ensemble_noise

SEEDS = (101, 102, 103)


def averaged(digits, key, decay):
    """Scores of the last iterate's and of the averaged iterates' predictions, from the same runs."""
    scores = {"last": [], "average": []}
    for seed in SEEDS:
        budget = {"epsilon": EPSILON, "delta": DELTA, "epochs": EPOCHS}
        run = train(METHODS[key], digits.train, **budget, seed=seed, ema=decay)
        learner = run.learner
        for name in scores:
            if name == "last":
                average, learner.average = learner.average, None
            probs = learner.predict(digits.validation.x, generator=torch.Generator().manual_seed(seed)).probs
            scores[name].append(evaluate(probs, digits.validation.y))
            if name == "last":
                learner.average = average
    return scores


def ensembles(digits, key, members):
    """Scores of ensembles of so many members whose joint ε is the budget; one member is a single run."""
    n, scores, spent = len(digits.train), [], []
    steps = EPOCHS * math.ceil(n / BATCH_SIZE)
    facts = {"delta": DELTA, "dataset_size": n, "batch_size": BATCH_SIZE}
    sigma = ensemble_noise(members, target_epsilon=EPSILON, steps=steps, **facts)
    images = digits.train.x
    for seed in SEEDS:
        run = Run(key, 0, sigma, MAX_GRAD_NORM, METHODS[key].lr, BATCH_SIZE, OPTIONS.get(key, {}))
        seeds = range(100 * seed, 100 * seed + max(members, 2))
        ensemble = Ensemble(run, seeds, AnyNetwork(SmallCNN), images, digits.train.y)
        for _ in ensemble.train(steps):
            pass
        if members == 1:
            probs = dpivon.predict(ensemble.stack.model(0), ensemble.stack.posterior(0), digits.validation.x).probs
            spent.append(ensemble.member_epsilon(DELTA))
        else:
            probs = ensemble.predict(digits.validation.x).probs
            spent.append(ensemble.epsilon(DELTA))
        scores.append(evaluate(probs, digits.validation.y))
    return scores, sigma, max(spent), ensemble.member_epsilon(DELTA)


def line(name, scores, *facts):
    mean = {key: fmean(row[key] for row in scores) for key in ("accuracy", "nll", "ece")}
    print(
        f"{name:32s} accuracy {mean['accuracy']:.3f}  NLL {mean['nll']:.3f}  ECE {mean['ece']:.3f}  {' '.join(facts)}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ema", nargs="*", default=["dp-sgd", "dp-adam", "dp-adambc", "dp-ivon-gradsq"], choices=list(METHODS)
    )
    parser.add_argument("--decay", type=float, default=0.95)
    parser.add_argument("--ensemble", default="dp-adam", choices=list(METHODS))
    parser.add_argument("--members", type=int, nargs="*", default=[1, 2, 5])
    args = parser.parse_args()
    torch.set_num_threads(1)
    digits = load_digits()
    for key in args.ema:
        scores = averaged(digits, key, args.decay)
        for name, rows in scores.items():
            line(f"{key}, {name} (decay {args.decay:g})" if name == "average" else f"{key}, {name}", rows)
    for members in args.members:
        rows, sigma, joint, member = ensembles(digits, args.ensemble, members)
        line(
            f"{args.ensemble}, {members} member(s)",
            rows,
            f"σ {sigma:.2f}",
            f"joint ε {joint:.2f}",
            f"member ε {member:.2f}",
        )


if __name__ == "__main__":
    main()
