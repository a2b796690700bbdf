"""The table of docs/methods.md that says which default a person should get, from committed rows.

``python -m experiments.numbers`` writes it.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean

from experiments.tables.default import COMPARED, EPSILONS, REAL, RESULTS

STRONG = Path(__file__).parents[1] / "strong_privacy" / "results"
LENGTHS = ("few", "many")
#: Studies on a GPU, whose baselines have a rate tuned at each ε: the σ of each ε of the table.
CIFAR = {0.5: ("strong-paper", "5"), 1.0: ("strong-epsilon", "11.5"), 3.0: ("strong-epsilon", "4.3")}
CIFAR |= {8.0: ("strong-epsilon", "2.05")}
FASHION = {1.0: ("strong-fashion", "2.55"), 3.0: ("strong-fashion", "1.16"), 8.0: ("strong-fashion", "0.762")}
Scores = dict[str, float]  # method: mean over seeds


@cache
def own() -> dict[tuple[str, str, float], dict[str, tuple[float, float]]]:
    """{(data, length, ε): {method: (accuracy in %, NLL)}}, each method at its one default step size."""
    found: dict[tuple[str, str, float, str], list[tuple[float, float]]] = defaultdict(list)
    with RESULTS.open(newline="") as file:
        for r in csv.DictReader(file):
            key = r["data"], r["length"], float(r["epsilon"]), r["method"]
            found[key].append((100 * float(r["accuracy"]), float(r["nll"])))
    made: dict[tuple[str, str, float], dict[str, tuple[float, float]]] = defaultdict(dict)
    for (data, length, epsilon, method), scores in found.items():
        accuracies, losses = zip(*scores, strict=True)
        made[data, length, epsilon][method] = fmean(accuracies), fmean(losses)
    return made


def study(where: dict[float, tuple[str, str]], epsilon: float) -> Scores:
    """Of one σ of a study; the recipe has its default, trace = .25."""
    if epsilon not in where:
        return {}
    name, sigma = where[epsilon]
    found = defaultdict(list)
    with (STRONG / name / "runs.csv").open(newline="") as file:
        for r in csv.DictReader(file):
            shipped = r["method"] != "dp-steady" or json.loads(r["options"])["trace"] == 0.25
            if r["noise_multiplier"] == sigma and r["method"] in COMPARED and shipped:
                found[r["method"]].append(100 * float(r["tempered_accuracy"]))
    return {method: fmean(values) for method, values in found.items()}


def fashion_few(epsilon: float) -> Scores:
    """24 steps of b = 512, DP-Adam at its default rate."""
    runs = json.loads((STRONG / "few-steps-fashion-mlp.json").read_text())["runs"]
    found = {}
    for label, method in (("DP-Steady", "dp-steady"), ("DP-Adam 0.01", "dp-adam")):
        rows = [r for r in runs if (r["b"], r["T"], r["epsilon"], r["label"]) == (512, 24, epsilon, label)]
        found[method] = fmean(100 * r["test"]["raw"]["accuracy"] for r in rows)
    return found


def rows() -> Iterator[tuple[str, list[Scores]]]:
    with RESULTS.open(newline="") as file:
        facts = {(r["data"], r["length"]): (int(r["examples"]), r["steps"]) for r in csv.DictReader(file)}
    for data in (*REAL, "digits"):
        for length in LENGTHS:
            n, steps = facts[data, length]
            cells = [{m: a for m, (a, _) in own()[data, length, e].items()} for e in EPSILONS]
            yield f"`{data}`, {n:,} examples, T = {steps}", cells
    yield "Fashion-MNIST, 10,000 images, MLP, T = 24", [fashion_few(e) for e in EPSILONS]
    yield "Fashion-MNIST, small CNN, T = 1180, *tuned*", [study(FASHION, e) for e in EPSILONS]
    yield "CIFAR-10, few steps", [{} for _ in EPSILONS]
    yield "CIFAR-10, the paper's CNN, T = 1170, *tuned*", [study(CIFAR, e) for e in EPSILONS]


def shown(scores: Scores) -> str:
    if not scores:
        return "not measured"
    texts = {method: f"{value:.1f}" for method, value in scores.items()}
    best = max(texts.values(), key=float)
    return " / ".join("–" if m not in texts else f"**{t}**" if (t := texts[m]) == best else t for m in COMPARED)


def body() -> list[list[str]]:
    return [[name, *map(shown, cells)] for name, cells in rows()]


def behind(method: str, length: str) -> tuple[float, float, int, int, int]:
    """Points behind the best of a cell: mean, largest; cells of highest accuracy and lowest NLL; cells in all."""
    cells = [scores for (_, own_length, _), scores in own().items() if own_length == length]
    gaps = [max(a for a, _ in scores.values()) - scores[method][0] for scores in cells]
    least = sum(scores[method][1] == min(nll for _, nll in scores.values()) for scores in cells)
    return fmean(gaps), max(gaps), sum(gap == 0 for gap in gaps), least, len(cells)
