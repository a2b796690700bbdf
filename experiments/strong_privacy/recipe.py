"""The recipe for strong privacy against DP-SGD, DP-Adam and the paper's method, on CPU; every part taken away in turn.

    python -m experiments.strong_privacy.recipe digits        # one thread: about five minutes; digits.json
    python -m experiments.strong_privacy.recipe fashion       # about ten; --data /usr/share/datasets/fashion-mnist
    python -m experiments.strong_privacy.recipe temperature   # a minute: three private ways to choose a temperature
    python -m experiments.strong_privacy.recipe report        # tables and figure from the three: recipe.{md,png}

Every method has the same number of learning rates (five on digits, three on Fashion-MNIST), about √10 apart, the recipe's 2
apart; all average their iterates over a tenth of the training. The rate of least mean NLL on validation data is reported on
test data, for each ε. The recipe at its default is reported besides, nothing chosen. σ is such that training and the private
temperature together cost (ε, δ). Seeds are paired: seed i has the same first weights in every method. A temperature is
chosen on the training data, for the average over draws where a method has width.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

import dpivon
from dpivon.data import load_digits, load_fashion_mnist, normalised
from dpivon.methods import METHODS
from dpivon.privacy.temperature import clipped_sum, temperature_cost, temperature_noise
from dpivon.recipe import WIDTH
from dpivon.stacked import Run, Stack
from dpivon.temperature import log_probabilities, temper
from experiments.strong_privacy.mlp import BatchedMLP, graded, layers
from experiments.strong_privacy.stacked_temperature import calibrate_stack

OUT = Path(__file__).parent / "results"
RATE = METHODS["dp-steady"].lr


EPSILONS = (0.3, 1.0, 3.0, 8.0)


BOUND, SHARE = 1.0, 0.1


#: label: (method, options).
COMPARED = {
    "DP-SGD": ("dp-sgd", {"momentum": 0.9, "weight_decay": 0.0}),
    "DP-Adam": ("dp-adam", {"weight_decay": 0.0}),
    "DP-IVON-Gradsq": ("dp-ivon-gradsq", {}),
    "DP-Steady": ("dp-steady", {"trace": WIDTH}),
}


#: One rate each, nothing chosen: what is left of the recipe without one of its parts.
ABLATED = {
    "without the plan (T unknown)": ("dp-steady", RATE, {"steps": 0.0, "trace": WIDTH}),
    "v̂ pooled by tensor": ("dp-steady", RATE, {"curvature": "empirical-bayes-fisher", "trace": WIDTH}),
    "v̂ not pooled": ("dp-steady", RATE, {"curvature": "averaged-fisher", "trace": WIDTH}),
    "all of the spread": ("dp-steady", RATE, {"trace": 1.0}),
    "width of the curvature too": ("dp-steady", RATE, {"temperature": 0.01, "trace": WIDTH}),
}


DEFAULT = "DP-Steady, default"


class Digits:
    name, delta, batch, epochs, seeds, network = "digits", 1e-4, 256, 20, 5, (64, 32)
    draws, ablated = 16, True
    rates = {  # noqa: RUF012
        "DP-SGD": (0.01, 0.03, 0.1, 0.3, 1.0),
        "DP-Adam": (0.001, 0.003, 0.01, 0.03, 0.1),
        "DP-IVON-Gradsq": (0.1, 0.3, 1.0, 3.0, 10.0),
        "DP-Steady": (RATE / 4, RATE / 2, RATE, 2 * RATE, 4 * RATE),
    }

    def __init__(self, data):
        d = load_digits()
        self.train, self.validation, self.test = ((p.x.flatten(1), p.y) for p in (d.train, d.validation, d.test))


class Fashion:
    """10,000 images to train on, 5,000 others of the training set to choose by, and the test set."""

    name, delta, batch, epochs, seeds, network = "fashion", 1e-5, 512, 6, 3, (784, 32)
    draws, ablated = 8, True
    rates = {  # noqa: RUF012
        "DP-SGD": (0.1, 0.3, 1.0),
        "DP-Adam": (0.003, 0.01, 0.03),
        "DP-IVON-Gradsq": (0.3, 1.0, 3.0),
        "DP-Steady": (RATE / 2, RATE, 2 * RATE),
    }

    def __init__(self, data):
        found = load_fashion_mnist(data)
        x, y = normalised(found.train)
        self.train, self.validation = ((x[s].flatten(1), y[s]) for s in (slice(10_000), slice(-5_000, None)))
        test, labels = normalised(found.test)
        self.test = test.flatten(1), labels


def predicted(mean, std, x, seed, draws):
    """Probabilities at the mean, and averaged over draws where there is width, of one run."""
    point = layers(mean[None], x[None])[2][0].softmax(-1)
    if not bool((std > 0).any()):
        return point, point
    normals = torch.randn(draws, len(mean), generator=torch.Generator().manual_seed(seed))
    total = sum(layers((mean + std * z)[None], x[None])[2][0].softmax(-1) for z in normals)
    return point, total / draws


def trained(task, epsilon, seeds):
    """All runs at one ε as one stack; a row of scores a run."""
    x, y = task.train
    n, steps = len(x), task.epochs * math.ceil(len(x) / task.batch)
    sigma_t = temperature_noise(SHARE * epsilon, task.delta, accountant="rdp")
    plan = dpivon.budget(
        dataset_size=n,
        batch_size=task.batch,
        steps=steps,
        delta=task.delta,
        target_epsilon=epsilon,
        also=[temperature_cost(sigma_t)],
        accountant="rdp",
    )
    keys, runs = [], []
    entries = [
        (label, method, lr, options) for label, (method, options) in COMPARED.items() for lr in task.rates[label]
    ]
    if task.ablated:
        entries += [(label, *entry) for label, entry in ABLATED.items()]
    for label, method, lr, options in entries:
        for seed in range(seeds):
            keys.append((label, lr, seed))
            number = 1 + len(runs) + 1_000_000 * round(10 * epsilon)
            window = {"ema": 1 - 10 / (steps + 10)}
            runs.append(Run(method, number, plan.noise_multiplier, BOUND, lr, task.batch, {**window, **options}))
    network = BatchedMLP(*task.network)
    start = torch.stack([network.initial(seed) for _, _, seed in keys])
    stack = Stack(runs, network, x, y, start=start, steps=steps, accountant="rdp")
    for _ in stack.train(steps):
        pass
    spent = [stack.epsilon(i, task.delta) for i in range(len(runs))]
    where = [stack._row(i) for i in range(len(runs))]
    average, last, std = stack.average[where], stack.mean[where], stack.std[where]
    alive = [bool(torch.isfinite(a).all()) for a in average]
    guess = torch.full((n, 10), 0.1)
    fitted = [
        predicted(a, s, x, seed, task.draws)[1] if ok else guess
        for a, s, ok, (_, _, seed) in zip(average, std, alive, keys, strict=True)
    ]
    generators = [torch.Generator().manual_seed(run.seed) for run in runs]
    temperatures = calibrate_stack(stack, fitted, y, noise_multiplier=sigma_t, generators=generators)
    rows = []
    for i, (label, lr, seed) in enumerate(keys):
        row = {"method": label, "epsilon": epsilon, "lr": lr, "seed": seed, "temperature": temperatures[i]}
        row |= {"epsilon_training": spent[i], "epsilon_total": stack.epsilon(i, task.delta)}
        row["width"] = float(std[i].median()) if alive[i] else math.nan
        for part, (px, py) in (("validation", task.validation), ("test", task.test)):
            point, average_of_draws = predicted(average[i], std[i], px, seed, task.draws)
            tempered = temper(average_of_draws.nan_to_num(0.1), temperatures[i])
            row[part] = {
                "raw": graded(average_of_draws, py),
                "tempered": graded(tempered, py),
                "mean": graded(point, py),
                "last iterate": graded(predicted(last[i], 0 * std[i], px, seed, 0)[0], py),
            }
        rows.append(row)
    return rows, {"noise_multiplier": plan.noise_multiplier, "temperature_noise": sigma_t, "steps": steps}


def score(row, part, kind, key):
    """A run that diverged counts as guessing."""
    value = row[part][kind][key]
    return value if math.isfinite(value) else {"accuracy": 0.1, "nll": math.log(10), "ece": 0.9}[key]


def chosen(rows, label, epsilon, kind):
    """The rows at the learning rate with the least mean NLL on validation data, and that rate."""
    mine = [r for r in rows if r["method"] == label and r["epsilon"] == epsilon]
    rates = sorted({r["lr"] for r in mine})
    best = min(rates, key=lambda lr: fmean(score(r, "validation", kind, "nll") for r in mine if r["lr"] == lr))
    return [r for r in mine if r["lr"] == best], best


def compare(task, seeds):
    began, rows, facts = time.perf_counter(), [], {}
    for epsilon in EPSILONS:
        found, facts[f"{epsilon:g}"] = trained(task, epsilon, seeds)
        rows += found
        print(f"{task.name}, epsilon {epsilon:g}: {time.perf_counter() - began:.0f} s", flush=True)
    return {
        "task": {key: getattr(task, key) for key in ("delta", "batch", "epochs", "network", "rates")}
        | {"n": len(task.train[1])},
        "seeds": seeds,
        "facts": facts,
        "seconds": time.perf_counter() - began,
        **hardware(),
        "runs": rows,
    }


def hardware():
    return {
        "torch": torch.__version__.split("+")[0],
        "machine": f"{platform.machine()}, one thread of {os.cpu_count()} cores",
    }


def exponential(z, y, sigma, generator, bound=3.0):
    """log T from a grid of 65 with probability ∝ exp(−(2/σ) Σ clipped NLL / R): (2/σ)-bounded range, so 1/(2σ²)-zCDP."""
    grid = torch.linspace(-math.log(8), math.log(8), 65)
    nll = torch.stack([-(z / math.exp(t)).log_softmax(-1).gather(-1, y[:, None]).squeeze(-1) for t in grid])
    total = nll.clamp(max=bound).sum(1)  # between 0 and the bound: adding an example moves differences by at most that
    p = (-(2 / sigma) * total / bound).softmax(0)
    return math.exp(float(grid[torch.multinomial(p, 1, generator=generator)]))


def grid_noise(z, y, sigma, generator, bound=3.0):
    """The least of 13 clipped NLL sums, each with noise of σ √13 times half the bound (they are centred)."""
    grid = torch.linspace(-math.log(8), math.log(8), 13)
    nll = torch.stack([-(z / math.exp(t)).log_softmax(-1).gather(-1, y[:, None]).squeeze(-1) for t in grid])
    total = (nll.clamp(max=bound) - bound / 2).sum(1)
    noisy = total + sigma * math.sqrt(13) * bound / 2 * torch.randn(13, generator=generator, dtype=torch.float64)
    return math.exp(float(grid[noisy.argmin()]))


def halving(z, y, sigma, generator, bound=3.0, k=6):
    """The library's: see dpivon.privacy.temperature, whose law the tests hold to its closed form."""
    middle = 0.0
    for step in range(1, k + 1):
        noise = sigma * math.sqrt(k) * bound * float(torch.randn((), generator=generator))
        answer = float(clipped_sum(z, y, math.exp(middle), bound)) + noise
        middle += math.copysign(math.log(8) / 2**step, answer)
    return math.exp(middle)


WAYS = {
    "halving (ours)": halving,
    "exponential mechanism, NLL ≤ 3": exponential,
    "NLL ≤ 10": partial(exponential, bound=10.0),
    "noise on a grid, NLL ≤ 3": grid_noise,
    "grid, NLL ≤ 10": partial(grid_noise, bound=10.0),
}


def temperatures(repeats=20):
    """Excess NLL over the best temperature; 10 classes, labels drawn at T = 2.5 from predictions that are too sure."""
    rows = []
    for n in (300, 1_000, 5_000, 50_000):
        generator = torch.Generator().manual_seed(n)
        z = log_probabilities((3 * torch.randn(n, 10, generator=generator)).softmax(-1))
        y = torch.multinomial((z / 2.5).softmax(-1), 1, generator=generator).squeeze(1)
        for epsilon in (0.03, 0.1, 0.3):
            sigma = temperature_noise(epsilon, 1e-5, accountant="rdp")
            nll = lambda t: float(torch.nn.functional.cross_entropy(z / t, y))  # noqa: B023, E731
            best = min(nll(math.exp(t)) for t in torch.linspace(0, 2, 41).tolist())
            row = {"n": n, "epsilon": epsilon, "sigma": sigma, "raw": nll(1.0) - best}
            for name, way in WAYS.items():
                row[name] = fmean(nll(way(z, y, sigma, generator)) - best for _ in range(repeats if n < 50_000 else 3))
            rows.append(row)
    return {"rows": rows, "repeats": repeats, **hardware()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["digits", "fashion", "temperature", "report"])
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part == "report":
        from experiments.strong_privacy.recipe_page import report

        report(args.out)
        return
    if args.part == "temperature":
        result = temperatures()
    else:
        task = {"digits": Digits, "fashion": Fashion}[args.part](args.data)
        result = compare(task, args.seeds or task.seeds)
    (args.out / f"{args.part}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
