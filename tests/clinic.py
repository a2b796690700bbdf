"""A small table that can be learned: whether somebody is ill, from age, dose and sex."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

HEADER = ["age", "dose", "sex", "note", "ill"]
SCHEMA = """\
source: made up
target: ill
classes: ['yes', 'no']
ignore: [note]
columns:
  age: {min: 0, max: 100}
  dose: {min: 0, max: 10}
  sex: {categories: [f, m]}
"""


def rows(n: int, seed: int = 0) -> list[list[Any]]:
    draw = np.random.default_rng(seed)
    out: list[list[Any]] = []
    for _ in range(n):
        age, dose, sex = round(draw.uniform(0, 100), 2), round(draw.uniform(0, 10), 3), str(draw.choice(["f", "m"]))
        ill = age / 100 + dose / 10 + 0.5 * (sex == "m") > 1.25
        out.append([age, dose, sex, "free, text", "yes" if ill else "no"])
    return out


def write_csv(path: Path, table: list[list[Any]]) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([HEADER, *table])
    return path


def clinic(folder: Path, n: int = 300) -> dict[str, Any]:
    """Files in ``folder``, and the flags of a short run on them."""
    (folder / "schema.yaml").write_text(SCHEMA)
    write_csv(folder / "train.csv", rows(n))
    write_csv(folder / "test.csv", rows(200, seed=1))
    return {
        "data": str(folder / "train.csv"),
        "schema": str(folder / "schema.yaml"),
        "epsilon": 4.0,
        "delta": 1e-4,
        "dataset_size": 300,
        "epochs": 4,
        "batch_size": 50,
        "hidden": [8],
        "lr": 0.5,
        "out": str(folder / "run"),
    }


def as_flags(options: dict[str, Any]) -> list[str]:
    """The same on the command line."""
    out = [str(options["data"])]
    for name, value in options.items():
        if name != "data":
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            out += [f"--{name.replace('_', '-')}", text]
    return out
