"""One second moment for all weights or one a tensor, for another network than the comparison's: a small vision transformer.

    python -m benchmarks.pooling      # ten minutes of one thread; experiments/strong_privacy/results/pooling.json

10,000 pictures of Fashion-MNIST, 16 patches of 7×7, width 32, two layers; b = 512, C = 1, 120 steps, ε of training. DP-
Steady is at r = 3.5, its averaged iterate without width; DP-SGD and DP-Adam are at the rate of least NLL on 5,000 other
pictures. Scores are of the test set, at T = 1 and at the best temperature for it, which nobody could choose: it tells
what is wrong with the direction, and nothing of calibration.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean, stdev

import torch
import torch.nn.functional as F

from benchmarks.few_steps import noise
from benchmarks.strong import BOUND, OUT, Fashion, hardware
from dpivon.models import VisionTransformer
from dpivon.optim.average import window_decay
from dpivon.recipe import RATE
from dpivon.stacked import AnyNetwork, Run, Stack

EPSILONS, BATCH, STEPS, SEEDS = (1.0, 8.0), 512, 120, 3
VARIANTS = {
    "one for all": [("dp-steady", RATE, {"curvature": "whole-fisher", "trace": 0.0})],
    "one for all, r = 7": [("dp-steady", 2 * RATE, {"curvature": "whole-fisher", "trace": 0.0})],
    "by tensor": [("dp-steady", RATE, {"curvature": "empirical-bayes-fisher", "trace": 0.0})],
    "DP-SGD": [("dp-sgd", lr, {"momentum": 0.9}) for lr in (0.3, 1.0)],
    "DP-Adam": [("dp-adam", lr, {}) for lr in (0.003, 0.01)],
}


def build():
    return VisionTransformer(image_size=28, patch=7, width=32, heads=2, depth=2, in_channels=1)


def pictures(part):
    x, y = part
    return x.view(-1, 1, 28, 28), y


@torch.no_grad()
def scores(model, part):
    x, y = pictures(part)
    logits = torch.cat([model(rows) for rows in x.split(1000)])
    best = min(float(F.cross_entropy(logits / t, y)) for t in torch.logspace(-0.5, 0.8, 40))
    right = float((logits.argmax(-1) == y).double().mean())
    return {"accuracy": right, "nll": float(F.cross_entropy(logits, y)), "best nll": best}


def cell(data, epsilon):
    """Every variant, rate and seed at one ε."""
    network, sigma = AnyNetwork(build), noise(data, BATCH, STEPS, epsilon)
    keys = [(name, *variant, seed) for name, those in VARIANTS.items() for variant in those for seed in range(SEEDS)]
    runs = [
        Run(method, 1 + i + round(1000 * epsilon), sigma, BOUND, lr, BATCH, {"ema": window_decay(STEPS), **options})
        for i, (_, method, lr, options, _) in enumerate(keys)
    ]
    start = torch.stack([network.initial(seed) for *_, seed in keys])
    stack = Stack(runs, network, *pictures(data.train), start=start, steps=STEPS)
    for _ in stack.train(STEPS):
        pass
    rows = []
    for i, (name, _, lr, _, seed) in enumerate(keys):
        model = network.model(stack.average[stack._row(i)]).eval()
        row = {"name": name, "lr": lr, "seed": seed, "epsilon": epsilon, "sigma": round(sigma, 4)}
        rows.append(row | {part: scores(model, getattr(data, part)) for part in ("validation", "test")})
    return rows


def chosen(rows, name, epsilon):
    mine = [r for r in rows if (r["name"], r["epsilon"]) == (name, epsilon)]
    by_rate = {lr: [r for r in mine if r["lr"] == lr] for lr in {r["lr"] for r in mine}}
    return min(by_rate.values(), key=lambda found: fmean(r["validation"]["best nll"] for r in found))


def table(rows):
    heads = [f"ε = {e:g}: accuracy, NLL, NLL at the best temperature" for e in EPSILONS]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (1 + len(EPSILONS)) + "|"]
    for name in VARIANTS:
        cells = []
        for epsilon in EPSILONS:
            found = [r["test"] for r in chosen(rows, name, epsilon)]
            values = [[r[key] for r in found] for key in ("accuracy", "nll", "best nll")]
            cells.append(", ".join(f"{fmean(v):.3f} ± {stdev(v):.3f}" for v in values))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data, began, rows = Fashion(args.data), time.perf_counter(), []
    for epsilon in EPSILONS:
        rows += cell(data, epsilon)
        print(f"epsilon {epsilon:g}: {time.perf_counter() - began:.0f} s", flush=True)
    told = {"b": BATCH, "T": STEPS, "seeds": SEEDS, "seconds": time.perf_counter() - began, **hardware()}
    (args.out / "pooling.json").write_text(json.dumps({**told, "runs": rows}, indent=1, ensure_ascii=False) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
