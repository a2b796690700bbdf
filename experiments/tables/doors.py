"""What `dpivon train` reaches by its defaults: the numbers of docs/train.md.

    python -m experiments.tables.doors     # results/doors.csv; what has rows is left out

- ``patients``: the example's table, eight seeds;
- ``diabetes``: regression on scikit-learn's data, two methods at their default step sizes and four ε, three splits, beside
  ordinary least squares without privacy; ``friedman``: the same on 3,000 rows of scikit-learn's generator;
- ``digits``: images of scikit-learn's digits, two methods at their default step sizes and four ε, three seeds;
- ``rare``: 5,000 made-up patients of whom 15 % are positive (the table "imbalanced"), three seeds: plain, with known
  shares of the classes, and with these and balanced costs.
"""

from __future__ import annotations

import csv
import json
import runpy
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpivon.cli import app
from dpivon.study.results.table import code, commit
from experiments.leaderboard.priors import tables
from experiments.tables.data import make

RESULTS = Path(__file__).parent / "results" / "doors.csv"
SCHEMA = Path(__file__).parents[2] / "examples" / "patients.yaml"
ROW = ("part", "way", "seed", "epsilon", "metric", "value", "device", "torch", "commit", "code")
Scores = dict[str, float]


def trained(command: str) -> tuple[float, dict[str, Any]]:
    """ε and the metrics of a run."""
    app([*f"train {command} --out run --quiet".split()], standalone_mode=False)
    summary = json.loads(Path("run/summary.json").read_text(encoding="utf-8"))
    return summary["epsilon"], summary["metrics"]


def write(name: str, x: Any, y: Any) -> str:
    with open(name, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"x{i}" for i in range(x.shape[1])), "y"])
        writer.writerows([*row, label] for row, label in zip(x.tolist(), y.tolist(), strict=True))
    return name


def schema(x: Any, low: float, high: float, target: str) -> str:
    columns = "\n".join(f"  x{i}: {{min: {low}, max: {high}}}" for i in range(x.shape[1]))
    Path("schema.yaml").write_text(f"target: y\n{target}columns:\n{columns}\n")
    return "schema.yaml"


def patients(seed: int, way: str) -> tuple[float, Scores]:
    runpy.run_path(str(SCHEMA.with_name("train_patients.py")))["write_tables"]()
    spent, found = trained(
        f"patients.csv --schema {SCHEMA} --epsilon 3 --delta 1e-4 --dataset-size 400 --test new-patients.csv --seed {seed}"
    )
    return spent, {"accuracy": found["mc_accuracy"]}


def diabetes(seed: int, way: str) -> tuple[float, Scores]:
    from sklearn.datasets import load_diabetes

    data = load_diabetes()
    order = np.random.default_rng(seed).permutation(len(data.data))
    return regression(seed, way, data.data[order], data.target[order], 342, (-0.2, 0.2), "0:400")


def friedman(seed: int, way: str) -> tuple[float, Scores]:
    from sklearn.datasets import make_friedman1

    x, y = make_friedman1(4000, n_features=8, noise=1.0, random_state=seed)
    return regression(seed, way, x, y, 3000, (0, 1), "0:30")


def regression(
    seed: int, way: str, x: Any, y: Any, n: int, bounds: tuple[float, float], target: str
) -> tuple[float, Scores]:
    (a, b), (c, d), (method, epsilon) = (x[:n], y[:n]), (x[n:], y[n:]), way.split()
    write("train.csv", a, b), write("test.csv", c, d)
    spent, found = trained(
        f"train.csv --schema {schema(x, *bounds, '')} --task regression --target-bounds {target} --method {method} "
        f"--epsilon {epsilon} --delta 1e-5 --dataset-size {n} --test test.csv --seed {seed}"
    )
    ones = np.ones((len(a), 1))
    fit = np.linalg.lstsq(np.hstack([a, ones]), b, rcond=None)[0]
    left = d - np.hstack([c, np.ones((len(c), 1))]) @ fit
    plain = 1 - float((left**2).sum() / ((d - d.mean()) ** 2).sum())
    return spent, {"least_squares_r2": plain} | {k: float(v) for k, v in found.items() if isinstance(v, float)}


def rare(seed: int, way: str) -> tuple[float, Scores]:
    parts = make("imbalanced")
    names = np.array(["well", "ill"])
    for part in ("train", "test"):
        write(f"{part}.csv", parts[part][0], names[parts[part][1]])
    more = {"plain": "", "prior": "--prior ill=.15", "balanced": "--prior ill=.15 --cost balanced"}[way]
    given = schema(parts["train"][0], -1, 1, "classes: [well, ill]\n")
    spent, found = trained(
        f"train.csv --schema {given} --method dp-adam --epsilon 3 --delta 1e-5 --dataset-size 5000 --test test.csv "
        f"--seed {seed} {more}"
    )
    return spent, {k: float(v) for k, v in found.items() if isinstance(v, float)}


def digits(seed: int, way: str) -> tuple[float, Scores]:
    from sklearn.datasets import load_digits

    data, (method, target) = load_digits(), way.split()
    order = np.random.default_rng(0).permutation(len(data.target))
    for part, rows in (("train", order[:1297]), ("test", order[1297:])):
        np.save(f"{part}-x.npy", data.images[rows].astype(np.float32)[:, None])
        np.save(f"{part}-y.npy", data.target[rows])
    spent, found = trained(
        f"train-x.npy,train-y.npy --classes {','.join('0123456789')} --bounds 0:16 --method {method} --epsilon {target} "
        f"--delta 1e-4 --dataset-size 1297 --test test-x.npy,test-y.npy --seed {seed}"
    )
    return spent, {"accuracy": found["mc_accuracy"], "nll": found["mc_nll"]}


#: What is the default, and the paper's method.
WAYS = tuple(f"{method} {target:g}" for target in (0.5, 1, 3, 8) for method in ("dp-steady", "dp-ivon-gradsq"))
PLAN = {
    "digits": (digits, WAYS, range(3)),
    "patients": (patients, ("",), range(8)),
    "diabetes": (diabetes, WAYS, range(3)),
    "friedman": (friedman, WAYS, range(3)),
    "rare": (rare, ("plain", "prior", "balanced"), range(3)),
}


def planned() -> Iterator[tuple[str, str, int]]:
    for part, (_, ways, seeds) in PLAN.items():
        yield from ((part, way, seed) for way in ways for seed in seeds)


def main() -> None:
    torch.set_num_threads(1)
    about = {"device": "CPU", "torch": torch.__version__, "commit": commit(), "code": code()}
    for part, way, seed in planned():
        if (part, way, str(seed)) in {(r["part"], r["way"], r["seed"]) for r in tables.read(RESULTS)}:
            continue
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            spent, found = PLAN[part][0](seed, way)
        own = {"part": part, "way": way, "seed": seed, "epsilon": round(spent, 4)} | about
        tables.append(RESULTS, [own | {"metric": k, "value": round(v, 5)} for k, v in found.items()], ROW)


if __name__ == "__main__":
    main()
