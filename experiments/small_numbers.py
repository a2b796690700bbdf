"""The measured numbers of the digits, the tables and the choices: functions for the marks of :mod:`experiments.numbers`."""

from __future__ import annotations

import csv
import json
import math
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from experiments.posterior.__main__ import Row
from experiments.shown import lines
from experiments.tables import default_page

ROOT = Path(__file__).parents[1]


@cache
def digit_rows() -> list[Row]:
    with (ROOT / "experiments/digits/results/rows.csv").open(newline="") as rows:
        return list(csv.DictReader(rows))


def of_digits(column: str, **wanted: str) -> list[float]:
    return [float(r[column]) for r in digit_rows() if all(r[k] == v for k, v in wanted.items())]


def demo_table() -> str:
    """The demo's table of seed 0."""
    head = ["method", "prediction", "ε", "accuracy", "NLL", "ECE", "Brier"]
    body = [
        [r["method"], r["way"], f"{float(r['epsilon']):.3f}", f"{100 * float(r['accuracy']):.1f} %"]
        + [f"{float(r[k]):.3f}" for k in ("nll", "ece", "brier")]
        for r in digit_rows()
        if (r["part"], r["seed"]) == ("demo", "0")
        and r["method"] in ("DP-SGD", "DP-Adam", "DP-IVON-Gradsq", "DP-Steady")
    ]
    return lines(head, body)


def demo_seeds(method: str) -> str:
    """Accuracy and NLL over the demo's seeds; averaged over draws where a method has them."""
    ways = {r["way"] for r in digit_rows() if (r["part"], r["method"]) == ("demo", method)}
    way = max(ways, key=lambda name: name[0].isdigit())
    a, n = (of_digits(k, part="demo", method=method, way=way) for k in ("accuracy", "nll"))
    return f"{100 * fmean(a):.1f} ± {100 * stdev(a):.1f} % and NLL {fmean(n):.3f} ± {stdev(n):.3f}"


def demo_error() -> str:
    """The standard error of one accuracy of the demo's table, on 300 test digits, in points."""
    right = fmean(of_digits("accuracy", part="demo", seed="0"))
    return f"{100 * math.sqrt(right * (1 - right) / 300):.1f}"


def ema_table() -> str:
    body = []
    for method in dict.fromkeys(r["method"] for r in digit_rows() if r["part"] == "ema"):
        cells = []
        for way in ("last", "average"):
            a, n = (fmean(of_digits(k, part="ema", method=method, way=way)) for k in ("accuracy", "nll"))
            cells.append(f"{100 * a:.1f} %, {n:.3f}")
        body.append([method, *cells])
    return lines(["", "last iterate: accuracy, NLL", "average: accuracy, NLL"], body)


def ensemble_table() -> str:
    body = []
    for way in dict.fromkeys(r["way"] for r in digit_rows() if r["part"] == "ensemble"):
        each = {
            k: fmean(of_digits(k, part="ensemble", way=way))
            for k in ("noise_multiplier", "epsilon", "accuracy", "nll", "ece")
        }
        sigma, spent, a, n, e = each.values()
        body.append([way, f"{sigma:.2f}", f"{spent:.2f}", f"{100 * a:.1f} %", f"{n:.3f}", f"{e:.3f}"])
    return lines(["members", "σ", "ε of one member", "accuracy", "NLL", "ECE"], body)


@cache
def door_rows() -> list[Row]:
    with (ROOT / "experiments/tables/results/doors.csv").open(newline="") as rows:
        return list(csv.DictReader(rows))


def door(part: str, metric: str, how: str, form: str, factor: str = "1") -> str:
    """What `dpivon train` reached over seeds: mean, range or all. ``part`` is PART or PART/WAY, with _ for a space."""
    name, _, way = part.replace("_", " ").partition("/")
    rows = [r for r in door_rows() if (r["part"], r["way"], r["metric"]) == (name, way, metric)]
    values = [float(factor) * float(r["value"]) for r in rows]
    if how == "mean":
        return format(fmean(values), form)
    return (" to " if how == "range" else " and ").join(
        format(v, form) for v in ((min(values), max(values)) if how == "range" else values)
    )


def default_table() -> str:
    """Which default a person should get, by data, number of steps and ε."""
    return lines(["data", *(f"ε = {e:g}" for e in default_page.EPSILONS)], default_page.body())


def shortfall(method: str, length: str) -> str:
    """How far a method at its default rate is behind the best of its cell, with few steps or many."""
    mean, most, first, least, cells = default_page.behind(method, length)
    return f"{mean:.1f} points on average, {most:.1f} at most; first in {first} of {cells}, lowest NLL in {least}"


@cache
def choosing() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "experiments/strong_privacy/results/choosing.json").read_text())
    return found


def best(sweep: str, **said: float) -> dict[str, Any]:
    """The row of a sweep with the least NLL among those with these values."""
    rows = [r for r in choosing()["rows"] if r["sweep"] == sweep and all(r[k] == v for k, v in said.items())]
    found: dict[str, Any] = min(rows, key=lambda r: r["point_nll"])
    return found


def choice(sweep: str, said: str, column: str, form: str, factor: str = "1") -> str:
    """One number of the best row of a sweep; ``said`` is such as value=3,lr_=1."""
    row = best(sweep, **{k: float(v) for k, v in (part.split("=") for part in said.split(","))})
    return format(float(factor) * row[column], form)


def price(sigma: str, form: str) -> str:
    """ε of a σ at b = 256."""
    return format(next(p["epsilon"] for p in choosing()["prices"]["256"] if p["sigma"] == float(sigma)), form)


def repeated(column: str, form: str, factor: str = "1") -> str:
    """The scores of the cell that is in three sweeps, in order."""
    cells = (
        ("lr", {"epsilon": 4.0, "value": 3.0}),
        ("batch", {"value": 256, "lr_": 3.0}),
        ("bound", {"value": 1.0, "lr_": 3.0}),
    )
    values = [format(v, form) for v in sorted(float(factor) * best(sweep, **said)[column] for sweep, said in cells)]
    return f"{values[0]}, {values[1]} and {values[2]}"


def choosing_table(sweep: str) -> str:
    """The best rate of every value of a sweep."""
    body = []
    for value in dict.fromkeys(
        r["epsilon" if sweep == "lr" else "value"] for r in choosing()["rows"] if r["sweep"] == sweep
    ):
        row = best(sweep, **{"epsilon" if sweep == "lr" else "value": value})
        score = [f"{100 * row['point_accuracy']:.1f} %", f"{row['point_nll']:.2f} ± {row['point_nll_std']:.2f}"]
        sigma = row["noise_multiplier"]
        if sweep == "bound":
            body.append([f"{value:g}", f"{row['lr_']:g}", f"{row['lr_'] * value:g}", *score])
        elif sweep == "batch":
            steps = 20 * math.ceil(1297 / value)
            body.append([f"{value:g}", str(steps), f"{sigma:.2f}", f"{sigma / value:.4f}", f"{row['lr_']:g}", *score])
        else:
            body.append([f"{value:g}", f"{sigma:.2f}", f"{row['value']:g}", *score])
    heads = {"bound": "C, best lr, α·C", "batch": "b, steps, σ, σ/b, best lr", "lr": "ε, σ, best lr"}
    return lines([*heads[sweep].split(", "), "accuracy", "NLL"], body)


MARKS = (
    demo_table,
    demo_seeds,
    demo_error,
    ema_table,
    ensemble_table,
    door,
    default_table,
    shortfall,
    choice,
    price,
    repeated,
    choosing_table,
)
