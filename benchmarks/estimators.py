"""Which curvature can be estimated under privacy, and what it is worth: a simulation on the digits, on one CPU thread.

    python -m benchmarks.estimators                # both parts, about six minutes; results/strong-privacy/simulation.*
    python -m benchmarks.estimators --part truth   # the estimators against the truth alone

Truth: softmax regression (650 weights) held where some epochs of training left it, so that every example's clipped gradient is
known. Releases are drawn as a private run would (Poisson batches, noise for the stated ε), the estimators read nothing else,
and are compared with v = ḡ² + (1 − q) F/b, which squares of gradients estimate, with ḡ² and with the diagonal Fisher F.

Training: an MLP of 2,410 weights, every method at every ε with three learning rates √10 apart and three seeds, averaged
iterates; the validation digits choose the learning rate, one for all ε or one for each. No test digit is read.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import nn

import dpivon
from dpivon import metrics
from dpivon.demo.data import load_digits
from dpivon.optim.curvature import ESTIMATORS, Evidence, estimate, memory_of, remembered
from dpivon.stacked import AnyNetwork, Run, Stack

OUT = Path(__file__).parents[1] / "results" / "strong-privacy"
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
DELTA, EPOCHS, BATCH, BOUND, EMA, SEEDS, DRAWS = 1e-4, 20, 256, 1.0, 0.95, 3, 16
RHO = 0.99

# ---- part one: against the truth


class Regression:
    """Softmax regression on the digits: K sets of weights [K, 10, 65], the bias last, and their clipped examples."""

    def __init__(self, x, y):
        self.x = torch.cat([x.flatten(1), torch.ones(len(x), 1)], 1)
        self.y = nn.functional.one_hot(y, 10).float()
        self.length = self.x.norm(dim=1)

    def residuals(self, weights):
        """(p − y) of every example, scaled so that its gradient has norm at most C: [K, N, 10]."""
        r = (self.x @ weights.mT).softmax(-1) - self.y
        return r * (BOUND / (r.norm(dim=-1) * self.length)).clamp(max=1.0).unsqueeze(-1)

    def gradient(self, residuals, mask):
        """Σ over the drawn examples / b: [K, 10, 65]."""
        return (residuals * mask.unsqueeze(-1)).mT @ self.x / BATCH

    def hessian(self, weights):
        """The diagonal of the (unclipped) mean Hessian, which is the expected Fisher: [10, 65]."""
        p = (self.x @ weights.mT).softmax(-1)
        return (p * (1 - p)).mT @ self.x.square() / len(self.x)


def ranks(v):
    """Ranks, ties sharing theirs."""
    _, inverse, counts = torch.unique(v, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    return (ends - (counts.double() - 1) / 2)[inverse]


def spearman(a, b):
    stacked = torch.stack([ranks(a), ranks(b)])
    r = float(torch.corrcoef(stacked)[0, 1])
    return 0.0 if math.isnan(r) else r


def held_weights(model, steps=60):
    """Where gradient descent on clipped gradients is after some steps: neither at the start nor at the optimum."""
    weights = torch.zeros(1, 10, 65)
    everyone = torch.ones(1, len(model.x))
    for _ in range(steps):
        weights = weights - 2.0 * model.gradient(model.residuals(weights), everyone) * BATCH / len(model.x)
    return weights


def against_truth(digits, epsilon, steps=200, replicates=24):
    """Bias, spread, errors and rank correlations of every estimator after so many releases at one point."""
    model, n = Regression(digits.train.x, digits.train.y), len(digits.train)
    q, sigma = BATCH / n, noise(n, epsilon)
    s2 = (sigma * BOUND / BATCH) ** 2
    weights = held_weights(model)
    clipped = model.residuals(weights)
    mean = (model.gradient(clipped, torch.ones(1, n)) * (BATCH / n))[0]
    fisher = (clipped[0].square().mT @ model.x.square()) / n
    v = mean.square() + (1 - q) * fisher / BATCH
    hessian = model.hessian(weights[0])
    generator = torch.Generator().manual_seed(int(1000 * epsilon))
    ess, h = float(n), 1.0
    memory = {name: {m: torch.zeros(replicates, 650) for m in memory_of(e)} for name, e in ESTIMATORS.items()}
    plain = {name: torch.zeros(replicates, 650) for name, e in ESTIMATORS.items() if not memory_of(e)}
    found = {}
    for t in range(1, steps + 1):
        mask = (torch.rand(replicates, n, generator=generator) < q).float()
        eta = math.sqrt(s2) * torch.randn(replicates, 10, 65, generator=generator)
        shift = torch.randn(replicates, 10, 65, generator=generator) / math.sqrt(ess * h)
        g = model.gradient(clipped, mask) + eta
        sampled = model.gradient(model.residuals(weights + shift), mask) + eta
        for name, estimator in ESTIMATORS.items():
            if name.endswith("-fisher"):
                continue  # the same estimate in another unit
            own = (sampled if estimator.needs_sample else g).flatten(1)
            evidence = Evidence(
                g=own,
                g_squared=own.square(),
                g_perturbation=own * shift.flatten(1),
                noise_variance=torch.full((replicates, 1), s2),
                hess=torch.full_like(own, h),
                ess=torch.full((replicates, 1), ess),
                weight_decay=torch.zeros(replicates, 1),
                t=torch.tensor(t),
                decay=torch.full((replicates, 1), RHO),
                memory=memory[name],
            )
            evidence = remembered(estimator, evidence)
            memory[name] = evidence.memory
            if name in plain:  # estimators without memory leave the averaging to IVON's recursion
                now = estimate(estimator, evidence, ((10, 65),))
                plain[name] = plain[name] * RHO + now * (1 - RHO)
                found[name] = plain[name] / (1 - RHO**t)
            elif t == steps:
                found[name] = estimate(estimator, evidence, ((10, 65),))
    rows = {}
    alive = hessian.flatten() > 0  # a pixel that is blank in every digit has neither gradient nor curvature
    for name, value in found.items():
        price = ESTIMATORS[name].needs_sample
        target = (hessian if price else v).flatten()
        got = value if price else value / ess
        error = got - target
        scale = float(target.mean())
        rows[name] = {
            "target": "diagonal Hessian" if price else "v",
            "bias": float(error.mean()) / scale,
            "bias on blank pixels": float(error[:, ~alive].mean()) / scale,
            "std": float(got.std(0).mean()) / scale,
            "rmse": float(error.square().mean().sqrt()) / scale,
            "rmse, squared mean": float((got - mean.square().flatten()).square().mean().sqrt())
            / float(mean.square().mean()),
            "rank, squared mean": fmean(spearman(row, mean.square().flatten()) for row in got),
            "rank, Fisher": fmean(spearman(row, fisher.flatten()) for row in got),
            "rank, Hessian": fmean(spearman(row, hessian.flatten()) for row in got),
        }
    facts = {
        "noise_multiplier": sigma,
        "noise variance over mean v": s2 / float(v.mean()),
        "share of v that is sampling": float(((1 - q) * fisher / BATCH).mean() / v.mean()),
        "rank of v with the Fisher": spearman(v.flatten(), fisher.flatten()),
    }
    return facts, rows


# ---- part two: training


def build(inputs=64, hidden=32):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 10))


def layers(theta, x):
    """Hidden units, the second layer's weights and the logits of K MLPs, [K, P], on inputs [K, n, d]."""
    w1, b1, w2, b2 = split(theta, x.shape[-1])
    hidden = (x @ w1.mT + b1).tanh()
    return hidden, w2, hidden @ w2.mT + b2


def split(theta, d):
    """Weights and biases of both layers, from rows [K, P]."""
    h = (theta.shape[1] - 10) // (d + 11)
    shapes = [(h, d), (1, h), (10, h), (1, 10)]
    parts = theta.split([rows * columns for rows, columns in shapes], 1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


def columns(scale):
    """Of K matrices D = rows ⊗ columns, the columns' part; the rows' is their first column."""
    return scale[:, :1] / scale[:, :1, :1]


class BatchedMLP(AnyNetwork):
    """The MLP with all runs of a stack computed at once; the ordinary loop costs many times as much here."""

    def __init__(self, inputs=64, hidden=32):
        super().__init__(lambda: build(inputs, hidden))

    def gradients(self, runs, capacity, device, dtype):
        return BatchedSums()


class BatchedSums:
    """Σ clipped gradients of K MLPs. A linear layer's example has ‖g‖² = (‖a‖² + 1) ‖d‖², d the gradient of its output."""

    def prepare(self, inputs):
        return inputs.flatten(1)

    scales = True  # knows a metric

    def clipped_sums(self, theta, batch, bound, metric=None):
        k = len(theta)
        spare = batch.places >= len(batch.labels)
        rows = batch.places.clamp(max=len(batch.labels) - 1)
        x, y = batch.inputs.flatten(1)[rows], batch.labels[rows]
        hidden, w2, logits = layers(theta, x)
        d2 = logits.softmax(-1) - nn.functional.one_hot(y, 10)
        d1 = (d2 @ w2) * (1 - hidden.square())
        biases = [d1, d2]
        if metric is not None:
            scale = torch.stack([torch.ones_like(t) if d is None else d for d, t in zip(metric, theta, strict=True)])
            w1, b1, w2, b2 = split(scale, x.shape[-1])
            biases = [d1 * b1, d2 * b2]
            x, hidden, d1, d2 = (
                x * columns(w1),
                hidden * columns(w2),
                d1 * w1[..., 0].unsqueeze(1),
                d2 * w2[..., 0].unsqueeze(1),
            )
        inputs, outputs = (x, hidden), (d1, d2)
        squares = [
            a.square().sum(-1) * d.square().sum(-1) + e.square().sum(-1)
            for a, d, e in zip(inputs, outputs, biases, strict=True)
        ]
        factor = ((bound.view(k, 1) / (squares[0] + squares[1]).sqrt()).clamp(max=1.0) * ~spare).unsqueeze(-1)
        sums = [
            s
            for a, d, e in zip(inputs, outputs, biases, strict=True)
            for s in ((d * factor).mT @ a, (e * factor).sum(1))
        ]
        return torch.cat([s.flatten(1) for s in sums], 1).double()


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


@cache
def noise(n, epsilon):
    """σ for ε."""
    facts = {"dataset_size": n, "batch_size": BATCH, "epochs": EPOCHS, "delta": DELTA}
    return dpivon.budget(target_epsilon=epsilon, **facts).noise_multiplier


def tempered(logits, y):
    """NLL at the temperature that suits these very digits best: an oracle, to see what is left beyond one number."""
    return float(min(nn.functional.cross_entropy(logits / t, y) for t in torch.logspace(-1, 1, 41)))


def graded(probs, y):
    """Accuracy, NLL and ECE; NaN where the run has diverged."""
    if not bool(torch.isfinite(probs).all()):
        return dict.fromkeys(("accuracy", "nll", "ece"), math.nan)
    right = float((probs.argmax(-1) == y).double().mean())
    return {"accuracy": right, "nll": metrics.nll(probs, y), "ece": metrics.ece(probs, y)}


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


# ---- what is written


def tables(result):
    command = "python -m benchmarks.estimators"
    lines = [
        "# Curvature under privacy: a simulation on the digits",
        "",
        f"`{command}` · {result['seconds']:.0f} s on one thread, torch {result['torch']} · "
        f"δ = {DELTA:g}, b = {BATCH}, C = {BOUND:g}, "
        f"{EPOCHS} epochs of 1,297 digits, {SEEDS} seeds. Validation digits (200): three points of accuracy mean nothing.",
        "",
    ]
    if "truth" in result:
        lines += [
            "## Against the truth",
            "",
            "Softmax regression held at one point, 200 releases, ρ = .99, 24 repetitions. Bias, standard deviation and",
            "root mean square error in units of the mean target: v for squares, the Hessian's diagonal for Price, which is",
            "biased here because it sees clipped gradients, and the Hessian is not clipped. Rank correlations with ḡ², the",
            "diagonal Fisher of clipped gradients and the diagonal Hessian.",
        ]
        for e, (facts, rows) in result["truth"].items():
            lines += [
                "",
                f"ε = {e}: σ = {facts['noise_multiplier']:.2f}, s² = {facts['noise variance over mean v']:.3g} times the mean "
                f"v, of which "
                f"{100 * facts['share of v that is sampling']:.0f} % is sampling (F/b).",
                "",
                "| estimator | bias | bias, blank pixels | std | RMSE | RMSE to ḡ² | rank ḡ² | rank Fisher | rank Hessian |",
                "|---|---|---|---|---|---|---|---|---|",
            ]
            for name, r in rows.items():
                lines.append(
                    f"| {name} | {r['bias']:.3g} | {r['bias on blank pixels']:.3g} | {r['std']:.3g} | {r['rmse']:.3g} "
                    f"| {'–' if r['target'] != 'v' else format(r['rmse, squared mean'], '.3g')} "
                    f"| {r['rank, squared mean']:.2f} | {r['rank, Fisher']:.2f} | {r['rank, Hessian']:.2f} |"
                )
    if "training" in result:
        for name, text in (
            ("chosen", "the best of three learning rates at each ε"),
            ("single", "one learning rate for all ε, the best of three on average"),
        ):
            lines += ["", f"## Training: {text}", ""]
            for key, title in (
                ("accuracy", "Accuracy of the averaged mean"),
                ("nll", "NLL of the averaged mean"),
                ("mc_nll", f"NLL of {DRAWS} draws of the posterior"),
                ("mc_ece", "ECE of the draws (of the mean for point methods)"),
                (
                    "tempered_nll",
                    "NLL of the averaged mean after the best temperature (fitted on the same digits: an oracle)",
                ),
            ):
                if name == "single" and key not in ("accuracy", "nll", "mc_nll"):
                    continue
                lines += [f"{title}:", "", "| method | " + " | ".join(f"ε = {e:g}" for e in EPSILONS) + " |"]
                lines += ["|---" * (1 + len(EPSILONS)) + "|"]
                for label, found in result["training"].items():
                    cells = found[name]
                    shown = [
                        f"{c[k]:.3f} ± {c[f'{k}_std']:.3f}" if k in c else "–"
                        for c in (cells[f"{e:g}"] for e in EPSILONS)
                        for k in [key if key in c else ("ece" if key == "mc_ece" else key)]
                    ]
                    if any(s != "–" for s in shown):
                        lines.append(f"| {label} | " + " | ".join(shown) + " |")
                lines.append("")
            rates = ", ".join(
                f"{label} {'/'.join(format(c[name][f'{e:g}']['lr'], 'g') for e in EPSILONS)}"
                for label, c in result["training"].items()
            )
            lines += [f"Learning rates (ε = .5 to 8): {rates}."]
    return "\n".join(lines) + "\n"


def figure(result, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    colours = plt.get_cmap("tab10").colors
    fig, axes = plt.subplots(2, 2, figsize=(12, 9), constrained_layout=True)
    shown = (
        "gradsq",
        "gradsq-corrected",
        "signed",
        "averaged",
        "floored",
        "empirical-bayes",
        "rank-one",
        "rank-one-shrunk",
        "cross",
    )
    for axis, key, title in (
        (axes[0, 0], "rmse", "relative error against v = ḡ² + (1−q)F/b"),
        (axes[0, 1], "rank, Fisher", "rank correlation with the diagonal Fisher"),
    ):
        for colour, name in zip(colours, shown, strict=False):
            values = [rows[name][key] for _, rows in result["truth"].values()]
            axis.plot([float(e) for e in result["truth"]], values, "o-", color=colour, label=name, lw=1.6, ms=4)
        axis.set_title(f"200 releases at one point: {title}", fontsize=10)
        if key == "rmse":
            axis.set_yscale("log")
    methods = (
        "DP-SGD",
        "DP-Adam",
        "DP-AdamBC",
        "IVON, paper",
        "IVON, empirical-bayes",
        "IVON, empirical-bayes-fisher",
        "calm, empirical-bayes-fisher",
        "calm, rank-one-shrunk-fisher",
    )
    for axis, key, title in (
        (axes[1, 0], "accuracy", "validation accuracy, averaged mean"),
        (axes[1, 1], "mc_nll", "validation NLL (of draws, where any)"),
    ):
        for i, (colour, label) in enumerate(zip(colours, methods, strict=False)):
            cells = [result["training"][label]["single"][f"{e:g}"] for e in EPSILONS]
            keys = [key if key in c else "nll" for c in cells]
            means = [c[k] for c, k in zip(cells, keys, strict=True)]
            errors = [c[f"{k}_std"] for c, k in zip(cells, keys, strict=True)]
            places = [e * 1.02 ** (i - 4) for e in EPSILONS]
            axis.errorbar(places, means, errors, fmt="o-", color=colour, label=label, lw=1.6, ms=4, capsize=2)
        axis.set_title(f"MLP, one lr for all ε, 3 seeds: {title}", fontsize=10)
    for axis in axes.flat:
        axis.set_xscale("log")
        axis.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
        axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.set_xlabel("ε (δ = 1e-4)")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, framealpha=0.7)
    fig.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["both", "truth", "training"], default="both")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    digits = load_digits()
    began = time.perf_counter()
    result = {"torch": torch.__version__.split("+")[0]}
    if args.part != "training":
        result["truth"] = {}
        for e in EPSILONS:
            result["truth"][f"{e:g}"] = against_truth(digits, e)
            print(f"truth, epsilon {e:g}: {time.perf_counter() - began:.0f} s", flush=True)
    if args.part != "truth":
        rows = []
        for e in EPSILONS:
            rows += trained(digits, e, args.seeds)
            print(f"training, epsilon {e:g}: {time.perf_counter() - began:.0f} s", flush=True)
        result |= {"training": summary(rows), "runs": rows}
    result["seconds"] = time.perf_counter() - began
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "simulation.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    (args.out / "simulation.md").write_text(tables(result))
    if args.part == "both":
        figure(result, args.out / "simulation.png")
    print(tables(result))


if __name__ == "__main__":
    main()
