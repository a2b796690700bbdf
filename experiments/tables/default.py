"""What each method reaches in `dpivon.fit` at its one default step size: rows of the table in docs/methods.md.

    python -m experiments.tables.default --csv CSV --data CIFAR     # results/default.csv; what has rows is left out

- six real tables: scikit-learn's `wine`, `diabetes` and `cancer`; `pima`, `phoneme` and `adult` from the folder CSV, which has
  pima-indians-diabetes.csv, phoneme.csv and adult-train.csv of https://github.com/jbrownlee/Datasets (commit d20fcb6). A
  network with 64 hidden units; three seeds, each with its own split;
- `digits`: scikit-learn's images, the small CNN, the demo's split, three seeds;
- `cifar10`: 10,000 of its training images, the paper's CNN, three seeds, the first 2,000 test images, 8 draws. Few steps only:
  docs/methods.md takes many from a GPU study.

Few is about 24 steps, many is 40 epochs; b = N/8 (16 to 1024; 512 for `cifar10`), C = 1. One thread.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import dpivon
from dpivon.data import load_cifar10, load_digits, normalised
from dpivon.errors import PrivacyWarning
from dpivon.machine import cpu_name
from dpivon.methods import METHODS
from dpivon.metrics import evaluate
from dpivon.models import PaperCNN, SmallCNN
from dpivon.study.results.table import code, commit
from experiments.leaderboard.priors import tables
from experiments.tables.data import _declared, _real, _split

RESULTS = Path(__file__).parent / "results" / "default.csv"
EPSILONS, FEW, MANY = (0.5, 1.0, 3.0, 8.0), 24, 40  # steps, epochs
COMPARED = ("dp-steady", "dp-sgd", "dp-adam", "dp-ivon-gradsq")
REAL = ("wine", "diabetes", "cancer", "pima", "phoneme", "adult")
FILES = {"pima": "pima-indians-diabetes.csv", "phoneme": "phoneme.csv", "adult": "adult-train.csv"}
KEY = ("data", "length", "method", "epsilon", "seed")
FACTS = ("examples", "batch_size", "steps", "lr", "delta", "noise_multiplier", "epsilon_spent")
ROW = (*KEY, *FACTS, "accuracy", "nll", "seconds", "hardware", "torch", "commit", "code")


class Task(NamedTuple):
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    network: Any
    delta: float
    batch_size: int
    draws: int = 32


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


def images(name: str, folder: Path | None) -> Task:
    if name == "digits":
        d = load_digits()
        return Task(d.train.x, d.train.y, d.test.x, d.test.y, SmallCNN, 1e-4, len(d.train) // 8)
    if folder is None:
        raise SystemExit("data=None: CIFAR-10 is read from a folder. Give it by --data.")
    found = load_cifar10(folder)
    (x, y), (test_x, test_y) = normalised(found.train[np.arange(10_000)]), normalised(found.test[np.arange(2000)])
    return Task(x, y, test_x, test_y, PaperCNN, 1e-5, 512, 8)


def trained(task: Task, length: str, method: str, epsilon: float, seed: int) -> dict[str, Any]:
    began, each = time.perf_counter(), math.ceil(len(task.x) / task.batch_size)
    torch.manual_seed(seed)
    model, epochs = task.network(), max(1, round(FEW / each)) if length == "few" else MANY
    plan: dict[str, Any] = {"batch_size": task.batch_size, "epochs": epochs, "delta": task.delta, "seed": 1 + seed}
    fitted = dpivon.fit(model, task.x, task.y, method=method, target_epsilon=epsilon, progress=False, **plan)
    draws = min(task.draws, METHODS[method].samples)
    probs = fitted.predict(task.test_x, draws, generator=torch.Generator().manual_seed(seed)).probs
    facts = (len(task.x), task.batch_size, fitted.budget.steps, METHODS[method].lr, task.delta)
    row = dict(zip(FACTS, (*facts, fitted.budget.noise_multiplier, fitted.epsilon), strict=True))
    scores = evaluate(probs, task.test_y)
    return row | {k: scores[k] for k in ("accuracy", "nll")} | {"seconds": time.perf_counter() - began}


def planned(names: list[str]) -> Iterator[tuple[str, str, float, int, str]]:
    for name in names:
        for length in ("few",) if name == "cifar10" else ("few", "many"):
            for epsilon in EPSILONS:
                for seed in range(3):
                    yield from ((name, length, epsilon, seed, method) for method in COMPARED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="the folder of the downloaded tables")
    parser.add_argument("--data", type=Path, help="the folder of CIFAR-10")
    parser.add_argument("--tasks", nargs="*", default=[*REAL, "digits", "cifar10"])
    parser.add_argument("--table", type=Path, default=RESULTS)
    a = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PrivacyWarning)  # seeds are given, and the data is public
    about = {"hardware": f"{cpu_name()}, one thread", "torch": torch.__version__, "commit": commit(), "code": code()}
    kept: dict[tuple[str, int], Task] = {}
    for name, length, epsilon, seed, method in planned(a.tasks):
        own = {"data": name, "length": length, "method": method, "epsilon": epsilon, "seed": seed}
        if tuple(map(str, own.values())) in {tuple(r[k] for k in KEY) for r in tables.read(a.table)}:
            continue
        split = seed if name in REAL else 0
        if (name, split) not in kept:
            kept = {k: v for k, v in kept.items() if k[0] == name}
            kept[name, split] = table(name, seed, a.csv) if name in REAL else images(name, a.data)
        row = own | trained(kept[name, split], length, method, epsilon, seed) | about
        tables.append(a.table, [{k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()}], ROW)


if __name__ == "__main__":
    main()
