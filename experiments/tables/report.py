"""The tables of README.md, from results/final.csv and results/references.csv: python -m experiments.tables.report"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

HERE = Path(__file__).parent
MARK = "<!-- made by python -m experiments.tables.report -->\n"
METHODS = ("dp-sgd", "dp-adam", "dp-ivon-gradsq", "dp-steady")
SCORES = ("balanced_nll", "auc", "balanced_accuracy")


def rows():
    """Test scores, mean over seeds 1 to 5, by (table, ε) and (arm, method); the iterate is chosen on validation data."""
    found = defaultdict(lambda: defaultdict(list))
    with (HERE / "results" / "final.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            cell, who = (row["table"], float(row["epsilon"])), (row["arm"], row["method"])
            if row["seed"] not in ("0", "0.0"):
                found[cell, who][row["iterate"]].append(row)
    cells = defaultdict(dict)
    for (cell, who), iterates in found.items():
        if who[0] == "default":
            best = iterates["average"]
        else:
            best = min(iterates.values(), key=lambda some: mean(float(r["validation_balanced_nll"]) for r in some))
        cells[cell][who] = {s: mean(float(r[f"test_{s}"]) for r in best) for s in SCORES}
    references = defaultdict(list)
    with (HERE / "results" / "references.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["epsilon"]:
                references[row["table"], float(row["epsilon"])].append(row)
    for cell, some in references.items():
        if cell in cells:
            cells[cell]["reference", "dp-logistic"] = {s: mean(float(r[f"test_{s}"]) for r in some) for s in SCORES}
    return cells


def rank(cell, arm, score):
    """Of the default among the methods of an arm and objective perturbation; 1 is best."""
    others = [*((arm, m) for m in METHODS), ("reference", "dp-logistic")]
    sign = 1 if score == "balanced_nll" else -1
    own = sign * cell["default", "dp-steady"][score]
    return 1 + sum(sign * cell[o][score] < own for o in others if o in cell)


def main():
    whole = {("default", "dp-steady"), *((arm, m) for arm in ("before", "rule") for m in METHODS)}
    cells = {cell: found for cell, found in sorted(rows().items()) if whole <= set(found)}
    lines = [
        f"{len(cells)} cells (table × ε) with every run. Median rank of the default among five private methods and itself:",
        "",
    ]
    lines += ["| tuned step sizes with | balanced NLL | AUC | balanced accuracy |", "|---|---|---|---|"]
    names = {"before": "the network, C, b, T of before", "rule": "the rule's own network, C, b, T"}
    for arm, words in names.items():
        ranks = [median(rank(cell, arm, s) for cell in cells.values()) for s in SCORES]
        lines.append(f"| {words} | " + " | ".join(f"{r:g}" for r in ranks) + " |")
    lines += [
        "",
        "Balanced NLL / AUC on test data, mean of five seeds; *before* and *rule* are the best of four tuned methods.",
        "",
    ]
    lines += ["| table | ε | default | before | rule | objective perturbation |", "|---|---|---|---|---|---|"]
    for (table, epsilon), cell in cells.items():
        best = [min((cell[arm, m] for m in METHODS), key=lambda s: s["balanced_nll"]) for arm in ("before", "rule")]
        shown = [cell["default", "dp-steady"], *best, cell.get(("reference", "dp-logistic"))]
        texts = ["" if s is None else f"{s['balanced_nll']:.3f} / {s['auc']:.3f}" for s in shown]
        lines.append(f"| {table} | {epsilon:g} | " + " | ".join(texts) + " |")
    page = HERE / "README.md"
    page.write_text(page.read_text().split(MARK)[0] + MARK + "\n" + "\n".join(lines) + "\n")
    for (table, epsilon), cell in cells.items():
        if table == "imbalanced":
            print(table, epsilon, cell["default", "dp-steady"])


if __name__ == "__main__":
    main()
