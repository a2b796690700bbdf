"""What each method reaches at its one default step size: rows of the table in docs/methods.md.

    python -m experiments.tables.default --csv CSV     # results/default.csv; what has rows is left out

- six real tables: scikit-learn's `wine`, `diabetes` and `cancer`; `pima`, `phoneme` and `adult` from the folder CSV, which has
  pima-indians-diabetes.csv, phoneme.csv and adult-train.csv of https://github.com/jbrownlee/Datasets (commit d20fcb6). A
  network with 64 hidden units; every seed has its own split;
- `digits`: scikit-learn's images, the small CNN, the demo's split.

Few is about 24 steps, many is 40 epochs; b = N/8 (16 to 1024), C = 1, three seeds, one thread. The methods and ε of a seed are
one stack, whose rows are what `dpivon.fit` trains one at a time.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import dpivon
from dpivon.data import load_digits
from dpivon.errors import PrivacyWarning
from dpivon.machine import cpu_name
from dpivon.methods import METHODS
from dpivon.metrics import evaluate
from dpivon.models import SmallCNN
from dpivon.stacked import Run, Stack
from dpivon.stacked.networks import cross_entropy, network_for
from dpivon.study.results.table import code, commit
from experiments.leaderboard.priors import tables
from experiments.tables.data import _declared, _real, _split

RESULTS = Path(__file__).parent / "results" / "default.csv"
EPSILONS, SEEDS, FEW, MANY = (0.5, 1.0, 3.0, 8.0), 3, 24, 40  # steps, epochs
COMPARED = ("dp-steady", "dp-sgd", "dp-adam", "dp-ivon-gradsq")
REAL = ("wine", "diabetes", "cancer", "pima", "phoneme", "adult")
FILES = {"pima": "pima-indians-diabetes.csv", "phoneme": "phoneme.csv", "adult": "adult-train.csv"}
FACTS = ("examples", "batch_size", "steps", "delta", "noise_multiplier", "epsilon_spent", "lr")
KEY = ("data", "length", "seed", "method", "epsilon")
ROW = (*KEY, *FACTS, "accuracy", "nll", "seconds", "hardware", "torch", "commit", "code")


class Task(NamedTuple):
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    network: Any
    delta: float
    batch_size: int


def table(name: str, seed: int, folder: Path | None) -> Task:
    parts = _read(name, seed, folder) if name in FILES else _real(name, seed)
    (x, y), (test_x, test_y) = (
        (torch.as_tensor(parts[p][0], dtype=torch.float32), torch.as_tensor(parts[p][1])) for p in ("train", "test")
    )
    classes = int(max(y.max(), test_y.max())) + 1
    network = lambda: nn.Sequential(nn.Linear(x.shape[1], 64), nn.Tanh(), nn.Linear(64, classes))  # noqa: E731
    return Task(x, y.long(), test_x, test_y.long(), network, 1e-5, max(16, min(1024, len(x) // 8)))


def _read(name: str, seed: int, folder: Path | None) -> Any:
    """Numbers by declared ranges; every other column by one column per value."""
    if folder is None:
        raise SystemExit(f"csv=None: {name} is read from {FILES[name]}. Give the folder that has it by --csv.")
    with (folder / FILES[name]).open(newline="") as file:
        rows = [row for row in csv.reader(file, skipinitialspace=True) if row]
    *columns, labels = (np.array(column) for column in zip(*rows, strict=True))
    parts = []
    for column in columns:
        try:
            parts.append(_declared(column.astype(float)[:, None]))
        except ValueError:
            parts.append((column[:, None] == np.unique(column)).astype(float))
    return _split(np.concatenate(parts, 1), np.unique(labels, return_inverse=True)[1], seed)


def digits() -> Task:
    d = load_digits()
    return Task(d.train.x, d.train.y, d.test.x, d.test.y, SmallCNN, 1e-4, len(d.train) // 8)


def trained(task: Task, length: str, seed: int) -> list[dict[str, Any]]:
    """Every method at every ε, from the same first weights."""
    began, each = time.perf_counter(), math.ceil(len(task.x) / task.batch_size)
    torch.manual_seed(seed)
    model, epochs = task.network(), max(1, round(FEW / each)) if length == "few" else MANY
    shape: dict[str, Any] = {"dataset_size": len(task.x), "batch_size": task.batch_size, "delta": task.delta}
    plans = {e: dpivon.budget(**shape, epochs=epochs, target_epsilon=e) for e in EPSILONS}
    keys = [(method, e) for method in COMPARED for e in EPSILONS]
    runs = [
        Run(m, 1 + i + 100 * seed, plans[e].noise_multiplier, 1.0, METHODS[m].lr, task.batch_size)
        for i, (m, e) in enumerate(keys)
    ]
    network, steps = network_for(model, cross_entropy, None, "flat"), plans[EPSILONS[0]].steps
    start = network.pack(model).unsqueeze(0).repeat(len(runs), 1)
    stack = Stack(runs, network, task.x, task.y, start=start, steps=steps)
    for _ in stack.train(steps):
        pass
    rows = []
    for i, (run, (method, e)) in enumerate(zip(runs, keys, strict=True)):
        made = stack.model(i, averaged=run.averaged), stack.posterior(i, averaged=run.averaged)
        draws = torch.Generator().manual_seed(seed)
        probs = dpivon.predict(*made, task.test_x, METHODS[method].samples, generator=draws).probs
        scores, plan = evaluate(probs, task.test_y), plans[e]
        facts = (len(task.x), task.batch_size, steps, task.delta, plan.noise_multiplier, plan.epsilon, run.lr)
        row = {"method": method, "epsilon": e} | dict(zip(FACTS, facts, strict=True))
        rows.append(row | {k: scores[k] for k in ("accuracy", "nll")})
    return [row | {"seconds": (time.perf_counter() - began) / len(rows)} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="the folder of the downloaded tables")
    parser.add_argument("--tasks", nargs="*", default=[*REAL, "digits"], choices=[*REAL, "digits"])
    parser.add_argument("--table", type=Path, default=RESULTS)
    a = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PrivacyWarning)  # seeds are given, and the data is public
    about = {"hardware": f"{cpu_name()}, one thread", "torch": torch.__version__, "commit": commit(), "code": code()}
    for name, length, seed in ((n, way, s) for n in a.tasks for way in ("few", "many") for s in range(SEEDS)):
        own = {"data": name, "length": length, "seed": seed}
        if tuple(map(str, own.values())) in {tuple(r[k] for k in KEY[:3]) for r in tables.read(a.table)}:
            continue
        task = digits() if name == "digits" else table(name, seed, a.csv)
        rows = [own | row | about for row in trained(task, length, seed)]
        rounded = [{k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()} for row in rows]
        tables.append(a.table, rounded, ROW)


if __name__ == "__main__":
    main()
