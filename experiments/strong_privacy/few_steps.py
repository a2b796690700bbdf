"""The recipe with few steps, on CPU: where its large first steps break a network, and what a ramp or a cap does about it.

    python -m experiments.strong_privacy.few_steps TASK      # one thread, minutes; few-steps-TASK.json; the tasks:
                                             # digits-mlp, digits-relu, digits-cnn, fashion-mlp
    python -m experiments.strong_privacy.few_steps units     # half a minute: how many hidden units are dead, step by step
    python -m experiments.strong_privacy.few_steps report    # tables and figure from them: few-steps.{md,png}

Fashion-MNIST is read from --data, /usr/share/datasets/fashion-mnist where Debian has it.

All runs of a task at one T, b and ε are one stack; seed i has the same first weights in every method; C = 1, and training
has all of ε. DP-Adam has three rates, and the one of least mean NLL on validation data is reported for each T, b and ε. DP-
Steady has r = 3.5 throughout, but for the earlier default, v̂ pooled by tensor at r = 5. Predictions are each method's own,
from averaged iterates: DP-Steady's average over draws, DP-Adam's is at the mean. The ramp was chosen on validation digits;
test data were first read for the tables. A run that diverged counts as guessing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

import torch

import dpivon
from dpivon.models import MLP, SmallCNN
from dpivon.optim.average import window_decay
from dpivon.stacked import AnyNetwork, Run, Stack
from experiments.strong_privacy.mlp import BatchedMLP, graded
from experiments.strong_privacy.recipe import BOUND, OUT, RATE, Digits, Fashion, hardware, score

EPSILONS = (0.5, 1.0, 3.0, 8.0)
SEEDS, DRAWS, RATES = 3, 8, (0.01, 0.03, 0.1)
SIGNAL = 0.001  # a σ that leaves signal alone; not private
PLAIN, RAMP, CAP, ADAM = "without a ramp", "DP-Steady", "no step above w/4", "DP-Adam, best of three"
EARLIER = "by tensor, r = 5"
KEYS = ("accuracy", "nll")


def variants(steps, whole):
    """label: (method, rate, options), for a training of so many steps."""
    steady = {
        PLAIN: {"ramp": 0.0},
        RAMP: {},
        CAP: {"ramp": 0.0, "steps": max(steps, (4 * RATE) ** 2)},  # r w/√(16 r²) = w/4
    }
    if whole and steps <= 24:
        steady["ramp of 100"] = {"ramp": 100.0}
        steady["ramp of 2,500"] = {"ramp": 2500.0}
        steady["no ramp, no momentum"] = {"ramp": 0.0, "beta1": 0.0}
        steady["no ramp, not pooled"] = {"ramp": 0.0, "curvature": "averaged-fisher"}
    made = {label: ("dp-steady", RATE, options) for label, options in steady.items()}
    made[EARLIER] = ("dp-steady", 5.0, {"curvature": "empirical-bayes-fisher"})
    return made | {f"DP-Adam {lr:g}": ("dp-adam", lr, {"weight_decay": 0.0}) for lr in RATES}


@dataclass(frozen=True)
class Task:
    """What is trained: a network on a data set, at these (b, T); ``whole`` has every variant where steps are few."""

    title: str
    data: type
    network: AnyNetwork
    shape: tuple[int, ...]
    cells: tuple[tuple[int, int], ...]
    whole: bool


TASKS = {
    "digits-mlp": Task(
        "digits, MLP 64–32–10 (tanh)",
        Digits,
        BatchedMLP(64, 32),
        (64,),
        tuple(product((128, 512), (8, 12, 24, 64, 128, 400))),
        True,
    ),
    "digits-relu": Task(
        "digits, MLP 64–64–10 (ReLU)",
        Digits,
        AnyNetwork(lambda: MLP(64, 10)),
        (64,),
        tuple(product((128,), (8, 12, 24, 64))),
        True,
    ),
    "digits-cnn": Task(
        "digits, SmallCNN (ReLU)",
        Digits,
        AnyNetwork(SmallCNN),
        (1, 8, 8),
        ((128, 12), (128, 24), (128, 64), (512, 12)),
        True,
    ),
    "fashion-mlp": Task(
        "Fashion-MNIST, MLP 784–32–10 (tanh)",
        Fashion,
        BatchedMLP(784, 32),
        (784,),
        ((512, 8), (512, 12), (512, 24), (512, 64), (512, 128), (4096, 12)),
        False,
    ),
}


@torch.no_grad()
def predicted(network, mean, std, x, seed):
    """Probabilities as the method gives them: over draws where there is width."""
    if not bool((std > 0).any()):
        return network.model(mean)(x).softmax(-1)
    normals = torch.randn(DRAWS, len(mean), generator=torch.Generator().manual_seed(seed))
    return sum(network.model(mean + std * z)(x).softmax(-1) for z in normals) / DRAWS


def noise(data, batch, steps, epsilon):
    n, delta = len(data.train[0]), data.delta
    facts = {"dataset_size": n, "batch_size": batch, "steps": steps, "delta": delta, "accountant": "rdp"}
    plan = dpivon.budget(target_epsilon=epsilon, **facts)
    return plan.noise_multiplier


def cell(task, data, batch, steps, epsilon):
    """Every variant and seed at one b, T and ε; a row of scores a run."""
    x, y = data.train
    sigma = noise(data, batch, steps, epsilon)
    keys, runs = [], []
    for label, (method, lr, options) in variants(steps, task.whole).items():
        for seed in range(SEEDS):
            number = 1 + len(runs) + 100 * steps + 100_000 * batch + 1_000_000_000 * round(10 * epsilon)
            keys.append((label, seed))
            runs.append(Run(method, number, sigma, BOUND, lr, batch, {"ema": window_decay(steps), **options}))
    start = torch.stack([task.network.initial(seed) for _, seed in keys])
    stack = Stack(runs, task.network, x.view(-1, *task.shape), y, start=start, steps=steps)
    for _ in stack.train(steps):
        pass
    rows = []
    for i, (label, seed) in enumerate(keys):
        where = stack._row(i)
        row = {"label": label, "b": batch, "T": steps, "epsilon": epsilon, "sigma": round(sigma, 4), "seed": seed}
        for part, (px, py) in (("validation", data.validation), ("test", data.test)):
            p = predicted(task.network, stack.average[where], stack.std[where], px.view(-1, *task.shape), seed)
            row[part] = {"raw": {key: round(value, 4) for key, value in graded(p, py).items()}}
        rows.append(row)
    return rows


def compare(name, folder):
    task, began, rows = TASKS[name], time.perf_counter(), []
    data = task.data(folder)
    for (batch, steps), epsilon in product(task.cells, EPSILONS):
        rows += cell(task, data, batch, steps, epsilon)
        print(f"{name}: b {batch}, T {steps}, epsilon {epsilon:g}: {time.perf_counter() - began:.0f} s", flush=True)
    told = {"n": len(data.train[0]), "delta": data.delta, "seeds": SEEDS, "title": task.title}
    return {**told, "seconds": time.perf_counter() - began, **hardware(), "runs": rows}


def units(batch=128, steps=12):
    """SmallCNN's hidden units that answer no validation digit, after each step."""
    task, rows = TASKS["digits-cnn"], []
    data = Digits(None)
    x, y = data.train
    seen = data.validation[0].view(-1, *task.shape)
    for epsilon in (1.0, 8.0, math.inf):
        sigma = noise(data, batch, steps, epsilon) if math.isfinite(epsilon) else SIGNAL
        for label, options in ((PLAIN, {"ramp": 0.0}), (RAMP, {})):
            runs = [Run("dp-steady", 1 + seed, sigma, BOUND, RATE, batch, options) for seed in range(SEEDS)]
            stack = Stack(runs, task.network, x.view(-1, *task.shape), y, steps=steps, block=1)
            row = {"label": label, "epsilon": epsilon if math.isfinite(epsilon) else None, "dead": [], "moved": []}
            for _ in range(steps):
                before = stack.mean.clone()
                for _ in stack.train(1):
                    pass
                row["dead"].append(fmean(dead(task.network.model(m), seen) for m in stack.mean))
                row["moved"].append(float(((stack.mean - before).norm(dim=1) / before.norm(dim=1)).mean()))
            rows.append(row)
    return {"b": batch, "T": steps, "seeds": SEEDS, **hardware(), "rows": rows}


@torch.no_grad()
def dead(model, x):
    hidden = model.head.hidden(model.head.flatten(model.features(x)))
    return 1.0 - float((hidden > 0).any(0).double().mean())


# ---- what is written


def of(rows, batch, steps, epsilon, label):
    if label != ADAM:
        return [r for r in rows if (r["b"], r["T"], r["epsilon"], r["label"]) == (batch, steps, epsilon, label)]
    rates = [of(rows, batch, steps, epsilon, f"DP-Adam {lr:g}") for lr in RATES]
    return min(rates, key=lambda found: fmean(score(r, "validation", "raw", "nll") for r in found))


def labels_of(rows):
    return [label for label in dict.fromkeys(r["label"] for r in rows) if not label.startswith("DP-Adam")] + [ADAM]


def table(rows, key):
    labels = labels_of(rows)
    lines = ["| b | T | ε | " + " | ".join(labels) + " |", "|---" * (3 + len(labels)) + "|"]
    for batch, steps in dict.fromkeys((r["b"], r["T"]) for r in rows):
        for epsilon in EPSILONS:
            values = [[score(r, "test", "raw", key) for r in of(rows, batch, steps, epsilon, m)] for m in labels]
            cells = " | ".join(f"{fmean(v):.3f} ± {stdev(v):.3f}" if v else "" for v in values)
            lines.append(f"| {batch} | {steps} | {epsilon:g} | {cells} |")
    return lines


def summary(results):
    """Mean over ε, b and seeds, by T."""
    labels = (PLAIN, RAMP, CAP, "ramp of 100", "ramp of 2,500", EARLIER, ADAM)
    lines = ["| task | T | " + " | ".join(labels) + " |", "|---" * (2 + len(labels)) + "|"]
    for result in results.values():
        rows = result["runs"]
        for steps in sorted({r["T"] for r in rows}):
            batches = sorted({r["b"] for r in rows if r["T"] == steps})
            cells = []
            for label in labels:
                found = [r for b, e in product(batches, EPSILONS) for r in of(rows, b, steps, e, label)]
                cells.append(
                    ", ".join(f"{fmean(score(r, 'test', 'raw', k) for r in found):.3f}" for k in KEYS) if found else ""
                )
            lines.append(f"| {result['title']} | {steps} | " + " | ".join(cells) + " |")
    return lines


def report(out):
    results = {}
    for name in TASKS:
        if (out / f"few-steps-{name}.json").exists():
            results[name] = json.loads((out / f"few-steps-{name}.json").read_text())
    lines = [
        "# The recipe with few steps, on CPU",
        "",
        "`python -m experiments.strong_privacy.few_steps TASK` for each task, `… units`, `… report`. How it is done stands at "
        "the head of `experiments/strong_privacy/few_steps.py`. Test data; r = 3.5 but for the earlier default.",
        "",
        "**Accuracy and NLL, means over ε = .5, 1, 3, 8, over b and over seeds.**",
        "",
        *summary(results),
    ]
    counted = json.loads((out / "few-steps-units.json").read_text())
    shown = (1, 2, 3, 4, 6, 8, 12)
    lines += [
        "",
        f"**Dead hidden units of SmallCNN**, the share that answers no validation digit, after each of {counted['T']} steps "
        f"(b = {counted['b']}, {counted['seeds']} seeds; σ = {SIGNAL:g} is not private). {counted['machine']}, torch "
        f"{counted['torch']}.",
        "",
        "| ε | | " + " | ".join(f"t = {t}" for t in shown) + " | first step, of ‖weights‖ |",
        "|---" * (3 + len(shown)) + "|",
    ]
    for r in counted["rows"]:
        told = f"σ = {SIGNAL:g}" if r["epsilon"] is None else f"{r['epsilon']:g}"
        cells = " | ".join(f"{r['dead'][t - 1]:.2f}" for t in shown)
        lines.append(f"| {told} | {r['label']} | {cells} | {r['moved'][0]:.2f} |")
    for result in results.values():
        lines += [
            "",
            f"## {result['title']}: {result['n']:,} examples, C = {BOUND:g}, δ = {result['delta']:g}",
            "",
            f"{result['seeds']} seeds, mean ± standard deviation · {result['seconds']:.0f} s · {result['machine']}, torch "
            f"{result['torch']}",
        ]
        for key, title in zip(KEYS, ("Accuracy", "NLL"), strict=True):
            lines += ["", f"**{title}.**", "", *table(result["runs"], key)]
    (out / "few-steps.md").write_text("\n".join(lines) + "\n")
    figure(results, counted, out / "few-steps.png")
    return [out / "few-steps.md", out / "few-steps.png"]


def figure(results, counted, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    looks = {
        PLAIN: {"color": "tab:red", "ls": "--"},
        RAMP: {"color": "black", "lw": 2.4},
        CAP: {"color": "tab:blue", "lw": 1.2},
        EARLIER: {"color": "tab:green", "lw": 1.2},
        ADAM: {"color": "tab:orange", "lw": 1.4},
    }
    fig, grid = plt.subplots(2, 3, figsize=(13, 8), constrained_layout=True)
    *axes, last, legend = grid.flat
    for axis, result in zip(axes, results.values(), strict=False):
        rows = result["runs"]
        batch = min(r["b"] for r in rows)
        places = sorted({r["T"] for r in rows if r["b"] == batch})
        for label, look in looks.items():
            values = [
                fmean(score(r, "test", "raw", "nll") for e in EPSILONS for r in of(rows, batch, t, e, label))
                for t in places
            ]
            axis.plot(places, values, marker="o", ms=4, label=label, **look)
        axis.set_xscale("log")
        axis.set_xticks(places, [str(t) for t in places])
        axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.set_xlabel("steps T")
        axis.set_title(f"{result['title']}, b = {batch}\nNLL, mean over ε = .5 to 8", fontsize=9)
        axis.grid(alpha=0.3)
    legend.axis("off")
    legend.legend(*axes[0].get_legend_handles_labels(), loc="upper left", fontsize=10)
    for r in counted["rows"]:
        look = looks[r["label"]] | {"lw": {None: 1.0, 8.0: 1.7, 1.0: 2.4}[r["epsilon"]]}
        told = f"σ = {SIGNAL:g}" if r["epsilon"] is None else f"ε = {r['epsilon']:g}"
        last.plot(range(1, counted["T"] + 1), r["dead"], label=f"{r['label']}, {told}", **look)
    last.set_xlabel(f"step t of T = {counted['T']}")
    last.set_ylim(0, 1)
    last.set_title(f"SmallCNN, b = {counted['b']}\nshare of hidden units that are dead", fontsize=9)
    legend.add_artist(legend.get_legend())
    legend.legend(*last.get_legend_handles_labels(), loc="lower left", fontsize=10, title="hidden units")
    last.grid(alpha=0.3)
    fig.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*TASKS, "units", "report"])
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part == "report":
        report(args.out)
        return
    result = units() if args.part == "units" else compare(args.part, args.data)
    text = json.dumps(result, ensure_ascii=False).replace('{"label"', '\n{"label"')
    (args.out / f"few-steps-{args.part}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
