"""Does clipping in a metric that is learned from past releases help? On the digits, on CPU, everything else equal.

    python -m benchmarks.metric      # one thread, about two minutes: experiments/strong_privacy/results/metric.{json,md}

Four methods at the learning rates that ``benchmarks/strong.py`` chose for them without a metric, at each ε; all of ε goes to
training. Seed i has the same first weights, the same batches and the same noise with and without a metric, so differences are
paired. "known" is not private: its D is the one that the metric learns at σ = .05, held from the first step on. It says what
a metric of this form could bring if nobody had to learn it from noise. Scores are of the averaged iterates, at the mean; a run
that diverged counts as guessing.
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
from benchmarks.mlp import BatchedMLP, graded
from benchmarks.strong import BOUND, EPSILONS, OUT, Digits, hardware, predicted
from dpivon.stacked import Run, Stack

POINT = {"momentum": 0.9, "weight_decay": 0.0}
#: label: (method, rate for each ε, options).
METHODS = {
    "DP-Steady": ("dp-steady", (5.0, 5.0, 5.0, 5.0), {"curvature": "empirical-bayes-fisher"}),
    "DP-Adam": ("dp-adam", (0.03, 0.03, 0.03, 0.03), {"weight_decay": 0.0}),
    "DP-IVON-Gradsq": ("dp-ivon-gradsq", (0.3, 1.0, 3.0, 3.0), {}),
    "DP-SGD": ("dp-sgd", (0.03, 0.1, 0.3, 0.3), POINT),
}
#: label: (power, whether D is known).
METRICS = {
    "none": (0.0, False),
    "1/4": (0.25, False),
    "1/2": (0.5, False),
    "1/4, known": (0.25, True),
    "1/2, known": (0.5, True),
}
QUIET = 0.05


def stack_of(task, epsilon, sigma, power, seeds, steps):
    """All methods and seeds at one ε; a run's seed depends on neither metric nor σ."""
    runs, keys = [], []
    for m, (label, (method, rates, options)) in enumerate(METHODS.items()):
        for seed in range(seeds):
            number = 1 + seed + 100 * m + 1_000_000 * round(10 * epsilon)
            own = {"ema": 1 - 10 / (steps + 10), "metric": power, **options}
            runs.append(Run(method, number, sigma, BOUND, rates[EPSILONS.index(epsilon)], task.batch, own))
            keys.append((label, seed))
    network = BatchedMLP(*task.network)
    start = torch.stack([network.initial(seed) for _, seed in keys])
    return Stack(runs, network, *task.train, start=start, steps=steps), keys


def trained(stack, steps, scales=None):
    """Train, with D held at ``scales`` if given."""
    for _ in range(1 if scales is None else steps):
        hold(stack, scales)
        for _ in stack.train(steps if scales is None else 1):
            pass
    return hold(stack, scales)


def hold(stack, scales):
    for part, scale in zip(stack.parts, scales or [], strict=scales is not None):
        part.state["metric"].copy_(scale)
    return stack


def scores(stack, keys, task, epsilon, label):
    rows = []
    for i, (method, seed) in enumerate(keys):
        row = {
            "method": method,
            "metric": label,
            "epsilon": epsilon,
            "seed": seed,
            "spent": stack.epsilon(i, task.delta),
        }
        mean = stack.average[stack._row(i)]
        for part, (x, y) in (("validation", task.validation), ("test", task.test)):
            row[part] = graded(predicted(mean, 0.0 * mean, x, seed, 0)[0], y)
        part = next(p for p in stack.parts if p.rows.start <= stack._row(i) < p.rows.stop)
        if "metric" in part.state:
            d = part.state["metric"][stack._row(i) - part.rows.start].log()
            row["D"] = {"min": float(d.min().exp()), "max": float(d.max().exp()), "log_std": float(d.std())}
            row["D"]["noise"] = float((-2 * d).exp().mean())  # mean noise variance, in units of (σC/b)²
        rows.append(row)
    return rows


def compare(seeds):
    task, began, rows, facts = Digits(None), time.process_time(), [], {}
    n = len(task.train[0])
    steps = task.epochs * math.ceil(n / task.batch)
    common = {"dataset_size": n, "batch_size": task.batch, "steps": steps, "delta": task.delta}
    for epsilon in EPSILONS:
        sigma = dpivon.budget(target_epsilon=epsilon, **common).noise_multiplier
        facts[f"{epsilon:g}"] = {"noise_multiplier": sigma, "steps": steps}
        for label, (power, known) in METRICS.items():
            scales = None
            if known:
                quiet, _ = stack_of(task, epsilon, QUIET, power, seeds, steps)
                scales = [part.state["metric"].clone() for part in trained(quiet, steps).parts]
            stack, keys = stack_of(task, epsilon, sigma, power, seeds, steps)
            rows += scores(trained(stack, steps, scales), keys, task, epsilon, label)
        print(f"epsilon {epsilon:g}: {time.process_time() - began:.0f} s", flush=True)
    told = {key: getattr(task, key) for key in ("delta", "batch", "epochs", "network")} | {"n": n}
    return {
        "task": told,
        "seeds": seeds,
        "facts": facts,
        "seconds": time.process_time() - began,
        **hardware(),
        "runs": rows,
    }


# ---- what is written


def of(rows, method, label, epsilon):
    found = [r for r in rows if (r["method"], r["metric"], r["epsilon"]) == (method, label, epsilon)]
    return sorted(found, key=lambda r: r["seed"])


def score(row, key):
    value = row["test"][key]
    return value if math.isfinite(row["test"]["nll"]) else {"accuracy": 0.1, "nll": math.log(10)}[key]


def paired(rows, method, label, epsilon, key):
    """Mean difference from no metric over seeds, and its standard error."""
    both = zip(of(rows, method, label, epsilon), of(rows, method, "none", epsilon), strict=True)
    gaps = [score(a, key) - score(b, key) for a, b in both]
    return fmean(gaps), stdev(gaps) / math.sqrt(len(gaps))


def page(result):
    rows, task = result["runs"], result["task"]
    d, h = task["network"]
    header = "| method | metric | " + " | ".join(f"ε = {e:g}" for e in EPSILONS) + " |"
    lines = [
        "# Clipping in a metric of past releases, on the digits",
        "",
        "`python -m benchmarks.metric`. How it is done stands at the head of `benchmarks/metric.py`.",
        "",
        f"MLP {d}–{h}–10, {task['n']:,} examples, b = {task['batch']}, {task['epochs']} epochs, C = {BOUND:g}, "
        f"δ = {task['delta']:g}; {result['seeds']} seeds, test data · {result['seconds']:.0f} s of CPU · {result['machine']}, "
        f"torch {result['torch']}. “known” is not private.",
    ]
    for key, title in (("nll", "NLL"), ("accuracy", "Accuracy")):
        lines += ["", f"**{title}** without a metric, and the paired difference with one (± standard error).", ""]
        lines += [header, "|---" * (2 + len(EPSILONS)) + "|"]
        for method in METHODS:
            cells = [f"{fmean(score(r, key) for r in of(rows, method, 'none', e)):.3f}" for e in EPSILONS]
            lines.append(f"| {method} | none | " + " | ".join(cells) + " |")
            for label in list(METRICS)[1:]:
                gaps = [paired(rows, method, label, e, key) for e in EPSILONS]
                lines.append(f"| | {label} | " + " | ".join(f"{gap:+.3f} ± {error:.3f}" for gap, error in gaps) + " |")
    lines += [
        "",
        "**D at the end** of DP-Steady's runs: least and largest, the standard deviation of log D, and the mean noise variance "
        "of a coordinate over (σC/b)²; means over seeds.",
        "",
    ]
    lines += [header, "|---" * (2 + len(EPSILONS)) + "|"]
    for label in list(METRICS)[1:]:
        cells = []
        for e in EPSILONS:
            found = [r["D"] for r in of(rows, "DP-Steady", label, e)]
            low, high, spread, noise = (fmean(f[k] for f in found) for k in ("min", "max", "log_std", "noise"))
            cells.append(f"{low:.2f} – {high:.2f}, {spread:.2f}, {noise:.2f}")
        lines.append(f"| DP-Steady | {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    result = compare(args.seeds)
    (args.out / "metric.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    (args.out / "metric.md").write_text(page(result))
    print(page(result))


if __name__ == "__main__":
    main()
