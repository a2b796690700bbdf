"""The same question on two tables, in a quarter of an hour of one core: predictors of the same runs, by ε of .5 to 100.

    python -m experiments.posterior.small          # results/small.csv and small-sets.csv; what has rows is left out

scikit-learn's digits, and a generated table of experiments/tables (``friedman``, 20,000 rows). One hidden layer of 64
tanh units; b, C and the number of steps are those of ``dpivon.defaults`` for the number of rows and ε. Rates are chosen
for each method and ε by the NLL of the averaged iterates on validation rows (seed 0), and so are scales of draws and
temperatures (seeds 1 to 5), which are not charged, alike for all. Scores are of test rows.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from dpivon.defaults import table_defaults
from dpivon.metrics import nll
from dpivon.optim.ivon_rule import variance
from dpivon.privacy.accounting import epsilon, noise_multiplier
from experiments.leaderboard.priors import tables
from experiments.posterior import sets as prediction_sets
from experiments.posterior.predictors import DRAWS, Trained
from experiments.posterior.run import filled, maps, scores
from experiments.tables import data
from experiments.tables.run import RATES, delta
from experiments.tables.train import HIDDEN, Block, Net, Spec, train

RESULTS = Path(__file__).parent / "results"
NAMES = ("digits", "friedman")
EPSILONS = (0.5, 1.0, 3.0, 8.0, 100.0)
SEEDS = range(1, 6)
SCALE = 3.0  # inputs lie in [-1, 1] and are multiplied by it, as the defaults do
RAW = (("mean", 0.0), ("own", 1.0))  # predictors whose rows are kept without a temperature too
ROW = (
    *("table", "method", "epsilon", "epsilon_spent", "delta", "noise_multiplier", "max_grad_norm", "batch", "steps"),
    *("train_size", "lr", "seed", "predictor", "scale", "map", "charged", "draws", "condition", "accuracy", "nll", "ece"),
    *("adaptive_ece", "ece_floor", "brier", "aurc", "fit_nll", "seconds", "device", "torch", "commit"),
)  # fmt: skip
SET = ("table", *(name for name in prediction_sets.ROW if name not in ("map", "charged")))
Parts = dict[str, tuple[Tensor, Tensor]]


def load(name: str) -> tuple[Parts, int]:
    parts = {k: (torch.tensor(x, dtype=torch.float32), torch.tensor(y).long()) for k, (x, y) in data.make(name).items()}
    return parts, int(parts["train"][1].max()) + 1


class Watch:
    """Keeps the iterates of the second half, and at the end the deviation of DP-IVON-Gradsq's own posterior."""

    def __init__(self, steps: int) -> None:
        self.steps, self.seen, self.std = steps, [], torch.zeros(0)

    def __call__(self, t: int, states: Sequence[tuple[Block, dict[str, Tensor]]]) -> None:
        if 2 * t >= self.steps:
            self.seen.append(torch.cat([state["mean"] for _, state in states]))
        if t == self.steps:
            self.std = torch.cat([self._std(*one) for one in states])

    def _std(self, block: Block, state: dict[str, Tensor]) -> Tensor:
        own = block.hyper
        if "hess" not in state or "temperature" in own:  # DP-Steady's own width is of its iterates, as swag's is
            return torch.zeros_like(state["mean"])
        return variance(state["hess"], ess=own["ess"], weight_decay=own["weight_decay"]).sqrt()


def averaged(net: Net, rows: Sequence[Tensor], x: Tensor) -> Tensor:
    """Log of the mean probabilities of rows of parameters."""
    total = sum((net.forward(row.unsqueeze(0), x * net.scale)[1][0].softmax(-1) for row in rows), torch.zeros(()))
    return (total / len(rows)).clamp_min(1e-30).log()


def chosen(net: Net, parts: Parts, bound: float, how: dict[str, Any]) -> list[Spec]:
    """The rate of each method with the least NLL on validation rows."""
    x, y = parts["validation"]
    found = []
    for method, rates in RATES.items():
        specs = [Spec(method, rate, bound) for rate in rates]
        _, average = train(net, specs, *parts["train"], seed=1, **how)
        losses = [nll(averaged(net, [row], x).exp(), y) for row in average]
        found.append(min(zip(losses, specs, strict=True), key=lambda pair: (math.isnan(pair[0]), pair[0]))[1])
    return found


def predicted(net: Net, trained: Trained, parts: Parts, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of every predictor, and of prediction sets of the mean and of the iterates."""
    found: list[dict[str, Any]] = []
    covered: list[dict[str, Any]] = []
    (fit_x, fit_y), (x, y) = parts["validation"], parts["test"]
    for kind, scale in trained.wanted:
        g = Generator().manual_seed(seed)
        rows = trained.rows(kind, scale, DRAWS, g)
        fit, shown = averaged(net, rows, fit_x), averaged(net, rows, x)
        for name, _, f in maps(fit, fit_y, g)[:2]:
            own = {
                "predictor": kind,
                "scale": scale,
                "map": name,
                "charged": 0,
                "draws": len(rows),
                "condition": "clean",
            }
            own["fit_nll"] = nll(f(fit), fit_y)
            if name == "temperature" or (kind, scale) in RAW:
                found.append(own | scores(f(shown), y, g))
            if name == "temperature" and kind in ("mean", "iterates"):
                covered += [{"predictor": kind} | row for row in prediction_sets.rows(f(shown), y, seed)]
    return found, covered


def cell(name: str, eps: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All rows of a table and ε."""
    parts, classes = load(name)
    x, y = parts["train"]
    n, rule = len(y), table_defaults(len(y), eps)
    steps, rate = rule.epochs * math.ceil(n / rule.batch_size), min(1.0, rule.batch_size / n)
    sigma = noise_multiplier(eps, delta(n), rate, steps, "rdp")
    net = Net(x.shape[1], classes, HIDDEN, SCALE)
    how = {"sigma": sigma, "batch": rule.batch_size, "steps": steps}
    specs = chosen(net, parts, rule.max_grad_norm, how)
    last = classes * (HIDDEN + 1)
    found, covered = [], []
    for seed in SEEDS:
        began, watch = time.monotonic(), Watch(steps)
        _, average = train(net, specs, x, y, seed=1 + seed, watch=watch, **how)
        seconds, seen = round((time.monotonic() - began) / len(specs), 2), torch.stack(watch.seen, 1)
        about = {"table": name, "epsilon": f"{eps:g}", "delta": delta(n), "noise_multiplier": sigma, "seed": seed}
        about |= {
            "epsilon_spent": epsilon([(sigma, rate, steps)], delta(n), "rdp"),
            "train_size": n,
            "seconds": seconds,
        }
        about |= {"batch": rule.batch_size, "steps": steps, "max_grad_norm": rule.max_grad_norm}
        about |= tables.facts(torch.device("cpu"))
        for i, spec in enumerate(specs):
            own = about | {"method": spec.method, "lr": spec.lr}
            more, sets = predicted(net, Trained(average[i], watch.std[i], seen[i], last), parts, seed)
            found += [filled(own | row, ROW) for row in more]
            covered += [filled(own | row, SET) for row in sets]
    return found, covered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tables", nargs="*", default=list(NAMES), choices=NAMES)
    a = parser.parse_args()
    torch.set_num_threads(1)
    say = partial(print, flush=True)
    done = {(r["table"], r["epsilon"]) for r in tables.read(a.out / "small.csv")}
    for name in a.tables:
        for eps in EPSILONS:
            if (name, f"{eps:g}") not in done:
                began = time.monotonic()
                found, covered = cell(name, eps)
                tables.append(a.out / "small-sets.csv", covered, SET)
                tables.append(a.out / "small.csv", found, ROW)
                say(f"{name}, ε = {eps:g}: {len(found)} rows, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
