"""Part two: an MLP trained with every estimator, at every ε and learning rate, and which learning rate is best."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import torch
from torch import nn

from dpivon.stacked import Run, Stack
from experiments.strong_privacy.mlp import BatchedMLP, graded, layers
from experiments.strong_privacy.simulation import BATCH, BOUND, DRAWS, EMA, EPOCHS, noise

POINT = {"momentum": 0.9, "weight_decay": 0.0}
#: label: (method, learning rates, options). IVON's estimators at β₂ = .99: at .99999 h does not move in 120 steps.
VARIANTS = {
    "DP-SGD": ("dp-sgd", (0.03, 0.1, 0.3), POINT),
    "DP-Adam": ("dp-adam", (0.003, 0.01, 0.03), {"weight_decay": 0.0}),
    "DP-AdamBC": ("dp-adambc", (0.001, 0.003, 0.01), {"weight_decay": 0.0}),
    "IVON, paper": ("dp-ivon-gradsq", (0.3, 1.0, 3.0), {}),
    "IVON, paper, β₂ .99": ("dp-ivon-gradsq", (0.3, 1.0, 3.0), {"beta2": 0.99}),
    **{
        f"IVON, {name}": ("dp-ivon-gradsq", (0.3, 1.0, 3.0), {"beta2": 0.99, "curvature": name})
        for name in (
            "signed",
            "averaged",
            "floored",
            "empirical-bayes",
            "rank-one",
            "rank-one-shrunk",
            "cross",
            "reparam-pooled",
            "signed-fisher",
            "empirical-bayes-fisher",
            "rank-one-shrunk-fisher",
        )
    },
    **{
        f"calm, {name}": ("dp-calm", (0.003, 0.01, 0.03), {"beta2": 0.99, "curvature": name})
        for name in ("averaged-fisher", "empirical-bayes-fisher", "rank-one-shrunk-fisher", "cross")
    },
}


def tempered(logits, y):
    """NLL at the temperature that suits these very digits best: an oracle, to see what is left beyond one number."""
    return float(min(nn.functional.cross_entropy(logits / t, y) for t in torch.logspace(-1, 1, 41)))


def trained(digits, epsilon, seeds):
    """Every variant, learning rate and seed at one ε, as one stack."""
    n, sigma = len(digits.train), noise(len(digits.train), epsilon)
    keys, runs = [], []
    for label, (method, rates, options) in VARIANTS.items():
        for lr in rates:
            for seed in range(seeds):
                keys.append((label, lr, seed))
                number = 1 + len(runs) + 100_000 * int(10 * epsilon)
                runs.append(Run(method, number, sigma, BOUND, lr, BATCH, {**options, "ema": EMA}))
    network = BatchedMLP()
    start = torch.stack([network.initial(seed) for _, _, seed in keys])  # the same first weights for every method
    stack = Stack(runs, network, digits.train.x, digits.train.y, start=start)
    for _ in stack.train(EPOCHS * math.ceil(n / BATCH)):
        pass
    x, y = digits.validation.x.flatten(1), digits.validation.y
    rows = []
    for i, (label, lr, seed) in enumerate(keys):
        mean, std = stack.average[stack._row(i)], stack.std[stack._row(i)]
        logits = layers(mean[None], x[None])[2][0]
        scores = graded(logits.softmax(-1), y) | {
            "tempered_nll": tempered(logits, y),
            "median_std": float(std.median()),
        }
        if bool((std > 0).any()):
            normals = torch.randn(DRAWS, len(mean), generator=torch.Generator().manual_seed(seed))
            draws = layers(mean + std * normals, x.expand(DRAWS, -1, -1))[2].softmax(-1).mean(0)
            scores |= {f"mc_{key}": value for key, value in graded(draws, y).items()}
        rows.append({"method": label, "epsilon": epsilon, "lr": lr, "seed": seed, **scores})
    return rows


def summary(rows):
    """For each method and ε: the scores at the learning rate best there, and at the one that is best over all ε.

    "Best" is the lowest mean NLL of the posterior's mean; a run that diverged counts as guessing."""

    def score(row, key):
        value = row.get(key, math.nan)
        guess = {
            "nll": math.log(10),
            "mc_nll": math.log(10),
            "tempered_nll": math.log(10),
            "accuracy": 0.1,
            "mc_accuracy": 0.1,
        }
        return value if math.isfinite(value) else guess.get(key, 0.9)

    out = {}
    for label, (_, rates, _) in VARIANTS.items():
        mine = [r for r in rows if r["method"] == label]
        at = {
            (lr, e): [r for r in mine if r["lr"] == lr and r["epsilon"] == e]
            for lr in rates
            for e in sorted({r["epsilon"] for r in mine})
        }
        loss = {cell: fmean(score(r, "nll") for r in found) for cell, found in at.items()}
        epsilons = sorted({e for _, e in at})
        single = min(rates, key=lambda lr: fmean(loss[lr, e] for e in epsilons))
        for e in epsilons:
            best = min(rates, key=lambda lr: loss[lr, e])
            for name, lr in (("chosen", best), ("single", single)):
                found = at[lr, e]
                cell = {"lr": lr, "median_std": fmean(r["median_std"] for r in found)}
                for key in ("accuracy", "nll", "ece", "tempered_nll", "mc_accuracy", "mc_nll", "mc_ece"):
                    if key in found[0]:
                        values = [score(r, key) for r in found]
                        cell[key], cell[f"{key}_std"] = fmean(values), stdev(values) if len(values) > 1 else 0.0
                out.setdefault(label, {}).setdefault(name, {})[f"{e:g}"] = cell
    return out
