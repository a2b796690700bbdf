"""The tables of README.md, from results/final.csv and results/references.csv: python -m experiments.tables.report"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from pathlib import Path
from statistics import mean, median, stdev

from experiments.tables.data import UNSEEN

HERE = Path(__file__).parent
MARK = "<!-- made by python -m experiments.tables.report -->\n"
METHODS = ("dp-sgd", "dp-adam", "dp-ivon-gradsq", "dp-steady")
SCORES = ("balanced_nll", "auc", "balanced_accuracy")
DEFAULT, REFERENCE = ("default", "dp-steady"), ("reference", "dp-logistic")
ARMS = {"before": "the library's earlier network, C, b, T", "rule": "the rule's network, C, b, T"}
T_95 = 2.776  # of Student's t with four degrees of freedom


def rows():
    """Test scores of seeds 1 to 5, by (table, ε) and (arm, method); the iterate is chosen on validation data."""
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
        best = sorted(best, key=lambda row: int(row["seed"]))
        cells[cell][who] = {s: [float(r[f"test_{s}"]) for r in best] for s in SCORES}
    references = defaultdict(list)
    with (HERE / "results" / "references.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["epsilon"]:
                references[row["table"], float(row["epsilon"])].append(row)
    for cell, some in references.items():
        if cell in cells:
            cells[cell][REFERENCE] = {s: [float(r[f"test_{s}"]) for r in some] for s in SCORES}
    return cells


def losses(cell, who, score):
    """A score of every seed, the smaller the better."""
    return [value if score == "balanced_nll" else -value for value in cell[who][score]]


def rank(cell, arm, score):
    """Of the default among the methods of an arm and objective perturbation; 1 is best."""
    others = [o for o in (*((arm, m) for m in METHODS), REFERENCE) if o in cell]
    return 1 + sum(mean(losses(cell, o, score)) < mean(losses(cell, DEFAULT, score)) for o in others)


def against_the_best(cell, arm, score):
    """How much more the default loses than the method that came out best on these very test rows; with its 95 % half-width."""
    best = min(((arm, m) for m in METHODS), key=lambda o: mean(losses(cell, o, score)))
    more = [a - b for a, b in zip(losses(cell, DEFAULT, score), losses(cell, best, score), strict=True)]
    return mean(more), T_95 * stdev(more) / math.sqrt(len(more))


def ranks(cells, words):
    """Rows of the table of ranks, one per arm that some cell has whole."""
    for arm, named in ARMS.items():
        some = [cell for cell in cells if all((arm, m) in cell for m in METHODS)]
        if not some:
            continue
        texts = []
        for score in SCORES:
            gaps = [against_the_best(cell, arm, score) for cell in some]
            worse = sum(gap > width for gap, width in gaps)
            place = median(rank(cell, arm, score) for cell in some)
            texts.append(f"{place:g}; {worse} worse; {median(gap for gap, _ in gaps):+.4f}")
        yield f"| {words}, {named} | {len(some)} | " + " | ".join(texts) + " |"


def main():
    cells = {cell: found for cell, found in sorted(rows().items()) if {("rule", m) for m in METHODS} <= set(found)}
    lines = [
        "Each entry: the default's median rank among itself, four methods with tuned step sizes and objective perturbation;",
        "in how many cells (table × ε) it is worse than the best of the four by more than seed noise (paired 95 % interval,",
        "five seeds); and the median of that difference, positive where the default is worse. The best of the four is that",
        "on the same test rows.",
        "",
        "| tables, and what the tuned methods have | cells | balanced NLL | AUC | balanced accuracy |",
        "|---|---|---|---|---|",
        *ranks([cell for (table, _), cell in cells.items() if table not in UNSEEN], "on which the rule was chosen"),
        *ranks([cell for (table, _), cell in cells.items() if table in UNSEEN], "unseen"),
        "",
        "Balanced NLL / AUC / balanced accuracy on test data, mean of five seeds; *before* and *rule* are the best of four",
        "tuned methods by balanced NLL.",
        "",
        "| table | ε | default | before | rule | objective perturbation |",
        "|---|---|---|---|---|---|",
    ]
    for (table, epsilon), cell in sorted(cells.items(), key=lambda item: (item[0][0] in UNSEEN, item[0])):
        shown = [DEFAULT]
        for arm in ("before", "rule"):
            known = [(arm, m) for m in METHODS if (arm, m) in cell]
            whole = len(known) == len(METHODS)
            shown.append(min(known, key=lambda o: mean(cell[o]["balanced_nll"])) if whole else None)
        texts = [
            "" if who not in cell else " / ".join(f"{mean(cell[who][s]):.3f}" for s in SCORES)
            for who in (*shown, REFERENCE)
        ]
        lines.append(f"| {table}{' (unseen)' * (table in UNSEEN)} | {epsilon:g} | " + " | ".join(texts) + " |")
    page = HERE / "README.md"
    page.write_text(page.read_text().split(MARK)[0] + MARK + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
