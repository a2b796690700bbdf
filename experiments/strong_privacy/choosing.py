"""What σ, C, b, the learning rate, N_ess and h₀ do to DP-IVON: the figures of docs/choosing.md, on the digits.

    python -m experiments.strong_privacy.choosing       # one thread; docs/images/choosing-*.png and results/choosing.json

An MLP of 2,410 weights (64–32–10), 20 epochs of 1,297 digits, δ = 1e-4, three seeds per cell (0, 1, 2 for the first weights;
noise and batches have seeds of their own, counted from 1), scores on the 200 validation digits; no test digit is read. Where
a sweep does not move them: ε = 4, b = 256, C = 1, lr = 1, N_ess = N, h₀ = 1. Runs of one batch size are one stack.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from statistics import fmean, stdev

import torch

import dpivon
from dpivon.data import load_digits
from dpivon.stacked import Run, Stack
from experiments.strong_privacy.mlp import BatchedMLP, graded, layers
from experiments.strong_privacy.simulation import DELTA, EPOCHS

OUT, IMAGES = Path(__file__).parent / "results", Path(__file__).parents[2] / "docs" / "images"
SEEDS, DRAWS, BATCH, BOUND, EPSILON, LR = 3, 32, 256, 1.0, 4.0, 1.0
SIGMAS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
BOUNDS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
BATCHES = (32, 64, 128, 256, 512, 1024)
SIZES = (0.01, 0.1, 1.0, 10.0)
CURVATURES = (0.1, 1.0, 10.0)
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"


def cost(n, batch=BATCH, **known):
    return dpivon.budget(dataset_size=n, batch_size=batch, epochs=EPOCHS, delta=DELTA, accountant="rdp", **known)


def cells(n):
    """Every cell of every sweep: its sweep, what is varied, and the run it needs, with α as the optimizer would have it."""
    usual = cost(n, target_epsilon=EPSILON).noise_multiplier

    def cell(sweep, sigma=usual, bound=BOUND, lr=LR, batch=BATCH, size=1.0, h0=1.0, **said):
        # dpivon.IVON multiplies the learning rate by h₀ + δ; a stack takes the paper's α as it is.
        options = {"ess": size * n, "hess_init": h0}
        return sweep, said, {"sigma": sigma, "bound": bound, "lr": lr * (h0 + 1e-4), "batch": batch, "options": options}

    out = [cell("sigma", sigma=s, value=s) for s in SIGMAS]
    out += [cell("bound", bound=c, lr=lr, value=c, lr_=lr) for c in BOUNDS for lr in RATES]
    for epsilon in (1.0, 4.0, 16.0):
        sigma = cost(n, target_epsilon=epsilon).noise_multiplier
        out += [cell("lr", sigma=sigma, lr=lr, value=lr, epsilon=epsilon) for lr in RATES]
    for batch in BATCHES:
        sigma = cost(n, batch, target_epsilon=EPSILON).noise_multiplier
        out += [cell("batch", sigma=sigma, batch=batch, lr=lr, value=batch, lr_=lr) for lr in (0.1, 0.3, 1.0, 3.0)]
    return out + [cell("width", size=size, h0=h0, value=size, h0_=h0) for size in SIZES for h0 in CURVATURES]


def trained(digits, some, first):
    """These cells, each with every seed, as one stack; they have one batch size and so one number of steps."""
    keys = [(i, seed) for i in range(len(some)) for seed in range(SEEDS)]
    runs = [
        Run("dp-ivon-gradsq", first + k, c["sigma"], c["bound"], c["lr"], c["batch"], c["options"])
        for k, c in enumerate(some[i][2] for i, _ in keys)
    ]
    network = BatchedMLP()
    start = torch.stack([network.initial(seed) for _, seed in keys])
    stack = Stack(runs, network, digits.train.x, digits.train.y, start=start)
    for _ in stack.train(EPOCHS * math.ceil(len(digits.train) / some[0][2]["batch"])):
        pass
    x, y = digits.validation.x.flatten(1), digits.validation.y
    scores = [[] for _ in some]
    for k, (i, seed) in enumerate(keys):
        mean, std = stack.mean[stack._row(k)], stack.std[stack._row(k)]
        normals = torch.randn(DRAWS, len(mean), generator=torch.Generator().manual_seed(seed))
        point = graded(layers(mean[None], x[None])[2][0].softmax(-1), y)
        drawn = graded(layers(mean + std * normals, x.expand(DRAWS, -1, -1))[2].softmax(-1).mean(0), y)
        scores[i].append({"point": point, "drawn": drawn, "std": float(std.median())})
    return scores


def averaged(scores):
    """Means and deviations over seeds; a run that has diverged counts as guessing."""
    guess = {"accuracy": 0.1, "nll": math.log(10), "ece": 0.0}
    out = {"std": fmean(s["std"] for s in scores)}
    for kind in ("point", "drawn"):
        for key, worst in guess.items():
            values = [s[kind][key] if math.isfinite(s[kind][key]) else worst for s in scores]
            out[f"{kind}_{key}"], out[f"{kind}_{key}_std"] = fmean(values), stdev(values)
    return out


def everything():
    digits = load_digits()
    n, began = len(digits.train), time.perf_counter()
    every = cells(n)
    rows, first = [], 1
    for batch in BATCHES:
        some = [c for c in every if c[2]["batch"] == batch]
        for (sweep, said, run), scores in zip(some, trained(digits, some, first), strict=True):
            rows.append({"sweep": sweep, **said, "noise_multiplier": run["sigma"], **averaged(scores)})
        first += SEEDS * len(some)
        print(f"b = {batch}: {len(some) * SEEDS} runs, {time.perf_counter() - began:.0f} s", flush=True)
    prices = {
        str(b): [{"sigma": s, "epsilon": cost(n, b, noise_multiplier=s).epsilon} for s in SIGMAS]
        for b in (64, 256, 1024)
    }
    return {
        "command": "python -m experiments.strong_privacy.choosing",
        "torch": torch.__version__.split("+")[0],
        "threads": 1,
        "seeds": SEEDS,
        "runs": first - 1,
        "seconds": time.perf_counter() - began,
        "prices": prices,
        "rows": rows,
    }


# ---- the figures


def pick(result, sweep, **said):
    return [r for r in result["rows"] if r["sweep"] == sweep and all(r[k] == v for k, v in said.items())]


def line(axis, rows, key, colour, label, fmt="o-"):
    values, errors = [r[key] for r in rows], [r[f"{key}_std"] for r in rows]
    axis.errorbar(
        [r["value"] for r in rows], values, errors, fmt=fmt, color=colour, label=label, lw=1.6, ms=4, capsize=2
    )


def draw(result, folder):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    def new(columns=2):
        figure, axes = plt.subplots(1, columns, figsize=(9.6, 3.6), dpi=140, constrained_layout=True)
        for axis in axes:
            axis.spines[["top", "right"]].set_visible(False)
        return figure, axes

    def logged(axis, values, xlabel, ylabel):
        axis.set_xscale("log")
        axis.set_xticks(values, [f"{v:g}" for v in values])
        axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        axis.grid(alpha=0.25)

    def save(figure, name):
        figure.savefig(folder / f"choosing-{name}.png")
        plt.close(figure)

    figure, (left, right) = new()
    for (batch, prices), colour in zip(result["prices"].items(), (GREY, BLUE, ORANGE), strict=True):
        left.plot(SIGMAS, [p["epsilon"] for p in prices], "o-", color=colour, ms=4, label=f"b = {batch}")
    left.set_yscale("log")
    logged(left, SIGMAS, "σ", "ε at δ = 1e-4, 20 epochs")
    left.legend(frameon=False)
    rows = pick(result, "sigma")
    line(right, rows, "point_accuracy", BLUE, "mean of the posterior")
    line(right, rows, "drawn_accuracy", ORANGE, f"{DRAWS} draws")
    logged(right, SIGMAS, "σ, at b = 256", "validation accuracy")
    right.legend(frameon=False)
    save(figure, "sigma")

    figure, axes = new()
    shown = (("bound", BOUNDS, "C"), ("batch", BATCHES, "expected batch b"))
    for axis, (sweep, across, name) in zip(axes, shown, strict=True):
        rates = sorted({r["lr_"] for r in pick(result, sweep)})
        table = [[pick(result, sweep, value=v, lr_=lr)[0]["point_nll"] for v in across] for lr in rates]
        axis.imshow(table, cmap="viridis_r", vmin=0.2, vmax=math.log(10), aspect="auto", origin="lower")
        for y, row in enumerate(table):
            for x, value in enumerate(row):
                colour = "white" if value > 1.2 else "black"
                axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
        axis.set_xticks(range(len(across)), [f"{v:g}" for v in across])
        axis.set_yticks(range(len(rates)), [f"{v:g}" for v in rates])
        axis.set_xlabel(name)
        axis.set_ylabel("learning rate")
        axis.set_title(f"validation NLL at ε = {EPSILON:g}", fontsize=10)
    save(figure, "clip-batch")

    figure, (left, right) = new()
    for epsilon, colour in ((1.0, GREY), (4.0, BLUE), (16.0, ORANGE)):
        line(left, pick(result, "lr", epsilon=epsilon), "point_nll", colour, f"ε = {epsilon:g}")
        line(right, pick(result, "lr", epsilon=epsilon), "point_accuracy", colour, f"ε = {epsilon:g}")
    for axis, name in ((left, "validation NLL"), (right, "validation accuracy")):
        logged(axis, RATES, "learning rate", name)
    right.legend(frameon=False)
    save(figure, "lr")

    figure, (left, right) = new()
    for h0, colour in zip(CURVATURES, (GREY, BLUE, ORANGE), strict=True):
        rows = pick(result, "width", h0_=h0)
        left.plot(SIZES, [r["std"] for r in rows], "o-", color=colour, ms=4, label=f"h₀ = {h0:g}")
        line(right, rows, "drawn_nll", colour, f"h₀ = {h0:g}, draws")
        line(right, rows, "point_nll", colour, None, fmt="x--")
    left.set_yscale("log")
    logged(left, SIZES, "N_ess / N", "median standard deviation of a weight")
    logged(right, SIZES, "N_ess / N", "validation NLL")
    right.legend(frameon=False, title="crosses: the mean", title_fontsize=8)
    save(figure, "width")


def report(out):
    """The figures again, from the runs in ``out``."""
    draw(json.loads((out / "choosing.json").read_text()), IMAGES)
    return sorted(IMAGES.glob("choosing-*.png"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    (OUT / "choosing.json").write_text(json.dumps(everything(), indent=1, ensure_ascii=False) + "\n")
    report(OUT)


if __name__ == "__main__":
    main()
