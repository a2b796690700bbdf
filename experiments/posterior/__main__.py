"""The page of the experiment, from its table.

python -m experiments.posterior            # writes README.md from results/rows.csv
python -m experiments.posterior --check    # fails if the page is not what the table gives
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from textwrap import wrap

from experiments.strong_privacy.compare.statistics import Interval, interval

HERE = Path(__file__).parent
TITLES = {"dp-sgd": "DP-SGD", "dp-adam": "DP-Adam", "dp-ivon-gradsq": "DP-IVON-Gradsq", "dp-steady": "DP-Steady"}
COMMANDS = (
    "    python -m experiments.posterior.run --data DATA --table experiments/posterior/results/rows.csv",
    "    python -m experiments.posterior    # this page",
)
SMALL = (
    "Tempered NLL of a predictor less that of the mean of the same run ([small.py](small.py)): digits (1,078 rows to train "
    "on, 270 to choose and fit on) and `friedman` (20,000 and 4,000), one hidden layer of 64 units, rates chosen at each ε, "
    "five seeds, 95 % t intervals, bold where they exclude zero."
)
SETS = (
    "Prediction sets for 90 % of each class: means of four methods and five seeds, by ε of training. 'Rows' is the number of "
    "test rows that thresholds come from, under an ε of their own; the other half is scored."
)
BOUND = (
    "Two rates were tried at each larger C, the tuned rate of C = 1 over C and twice that; shown is the one with the lower "
    "tempered NLL on mirrored training images."
)
TABLES = ("digits", "friedman")
KINDS = ("own", "swag", "iterates", "one", "last", "ensemble")
Row = dict[str, str]


class Table:
    """Rows by method, ε, predictor, scale, map and condition; a list has one row per seed."""

    def __init__(self, path: Path, name: str = "") -> None:
        with path.open(newline="") as file:
            self.rows = [row for row in csv.DictReader(file) if row.get("table", "") == name]
        self.epsilons = list(dict.fromkeys(r["epsilon"] for r in self.rows))
        self.methods = [m for m in TITLES if any(r["method"] == m for r in self.rows)]
        self._by: dict[tuple[str, ...], list[Row]] = {}
        names = ("method", "epsilon", "predictor", "map", "condition", "charged")
        for row in sorted(self.rows, key=lambda r: int(r["seed"])):
            self._by.setdefault(tuple(row[name] for name in names), []).append(row)

    def get(
        self, method: str, eps: str, kind: str, scale: str, map_: str, condition: str, charged: str = "0"
    ) -> list[Row]:
        found = self._by.get((method, eps, kind, map_, condition, charged), [])
        return [r for r in found if not scale or r["scale"] == scale]

    def scale(self, method: str, eps: str, kind: str) -> str:
        """The scale of the least tempered NLL on the images that fit; '' where the method has no such predictor."""
        found = self.get(method, eps, kind, "", "temperature", "clean")
        scales = {r["scale"] for r in found}
        return min(scales, key=lambda s: mean(float(r["fit_nll"]) for r in found if r["scale"] == s), default="")

    def by_seed(self, rows: Sequence[Row], column: str) -> dict[str, float]:
        """The column of each seed, averaged over severities where there are several."""
        seeds = sorted({r["seed"] for r in rows})
        return {s: mean(float(r[column]) for r in rows if r["seed"] == s) for s in seeds}

    def less(self, ours: Sequence[Row], theirs: Sequence[Row], column: str, factor: float = 1.0) -> Interval | None:
        """Paired differences within runs; None where either is missing."""
        a, b = self.by_seed(ours, column), self.by_seed(theirs, column)
        both = sorted(a.keys() & b.keys())
        return interval([factor * (a[s] - b[s]) for s in both]) if len(both) > 1 else None


def shown(found: Interval | None, digits: int) -> str:
    if found is None:
        return ""
    bold = "**" if found.low > 0 or found.high < 0 else ""
    text = f"{bold}{found.mean:+.{digits}f}{bold} [{found.low:.{digits}f}, {found.high:.{digits}f}]"
    return text.replace("-", "−")


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(r) + " |" for r in (head, ["---"] * len(head), *body)]


def differences(t: Table, condition: str) -> list[str]:
    """Draws with their temperature less the mean with its own."""
    body = []
    for method in t.methods:
        for kind in KINDS:
            for eps in t.epsilons:
                scale = t.scale(method, eps, kind)
                ours = t.get(method, eps, kind, scale, "temperature", condition) if scale else []
                base = t.get(method, eps, "mean", "", "temperature", condition)
                if not ours or not base:
                    continue
                cells = [t.less(ours, base, "accuracy", 100.0), t.less(ours, base, "nll"), t.less(ours, base, "ece")]
                cells += [t.less(ours, base, "aurc")]
                start = [TITLES[method], f"{kind} × {float(scale):g}" if kind != "iterates" else kind, eps]
                body.append(start + [shown(c, d) for c, d in zip(cells, (2, 4, 4, 4), strict=True)])
    return table(["method", "predictor", "ε", "points", "NLL", "ECE", "AURC"], body)


def levels(t: Table) -> list[str]:
    """The mean under every map, and the method's own draws raw: averages over seeds on clean images."""
    ways = [("mean", "none", "0"), ("mean", "temperature", "0"), ("mean", "vector", "0")]
    ways += [("mean", "temperature", "1"), ("mean", "vector", "1"), ("own", "none", "0")]
    body = []
    for method in t.methods:
        for kind, map_, charged in ways:
            scale = "1.0" if kind == "own" else ""
            rows = {e: t.get(method, e, kind, scale, map_, "clean", charged) for e in t.epsilons}
            if not any(rows.values()):
                continue
            columns = (
                ("accuracy", 100.0, 1),
                ("nll", 1.0, 3),
                ("ece", 1.0, 3),
                ("adaptive_ece", 1.0, 3),
                ("ece_floor", 1.0, 3),
            )
            cells = [
                " / ".join(f"{f * mean(float(r[c]) for r in rows[e]):.{d}f}" for e in t.epsilons if rows[e])
                for c, f, d in columns
            ]
            name = {"none": "", "vector": ", DP-Platt"}.get(map_, f", {map_}")
            body.append([TITLES[method], f"{kind}{name}", "yes" if charged == "1" else "", *cells])
    return table(["method", "predictor", "charged", "accuracy, %", "NLL", "ECE", "equal-mass ECE", "its floor"], body)


def ood(t: Table) -> list[str]:
    """AUROC of telling clean images from others: the mean by entropy, draws by entropy and by mutual information."""
    body = []
    for method in t.methods:
        for condition in ("leaves", "noise"):
            cells = []
            for kind, column in (("mean", "auroc_entropy"), ("swag", "auroc_entropy"), ("swag", "auroc_information")):
                per = []
                for eps in t.epsilons:
                    scale = "" if kind == "mean" else t.scale(method, eps, kind)
                    rows = t.get(method, eps, kind, scale, "temperature", condition)
                    per.append(f"{mean(float(r[column]) for r in rows):.3f}" if rows else "")
                cells.append(" / ".join(per))
            body.append([TITLES[method], condition, *cells])
    return table(["method", "images", "mean, entropy", "SWAG, entropy", "SWAG, mutual information"], body)


def bounds(t: Table) -> list[str]:
    """DP-SGD at each C with the rate of the least tempered NLL on the images that fit, raw and tempered; first C = 1."""
    body = []
    for eps in t.epsilons:
        found = t.get("dp-sgd", eps, "bound", "", "temperature", "clean")
        if not found:
            continue
        seeds = {r["seed"] for r in found}
        ways = [("1", "mean", "0.0"), *(("", "bound", c) for c in sorted({r["scale"] for r in found}, key=float))]
        for named, kind, c in ways:
            of: dict[str, list[Row]] = {}
            for r in t.get("dp-sgd", eps, kind, c, "temperature", "clean"):
                if r["seed"] in seeds:
                    of.setdefault(r["lr"], []).append(r)
            lr = min(of, key=lambda rate: mean(float(r["fit_nll"]) for r in of[rate]))
            raw = [r for r in t.get("dp-sgd", eps, kind, c, "none", "clean") if r["lr"] == lr and r["seed"] in seeds]
            cells = [
                f"{mean(float(r[k]) for r in rows):.3f}" for rows in (raw, of[lr]) for k in ("accuracy", "nll", "ece")
            ]
            body.append([eps, named or f"{float(c):g}", f"{float(lr):.3g}", str(len(raw)), *cells[:3], *cells[4:]])
    return table(["ε", "C", "rate", "seeds", "accuracy", "NLL", "ECE", "NLL, temperature", "ECE, temperature"], body)


def covered(rows: Sequence[Row]) -> list[str]:
    """Prediction sets: means over seeds, by ε of training."""
    body = []
    keys = dict.fromkeys((r["method"], r["predictor"], r["set_epsilon"]) for r in rows)
    for method, kind, asked in sorted(keys, key=lambda k: (list(TITLES).index(k[0]), k[1] != "mean", float(k[2]))):
        cells = []
        for column in ("coverage", "least_class", "size", "single"):
            per: dict[str, list[float]] = {}
            for r in rows:
                if (r["method"], r["predictor"], r["set_epsilon"]) == (method, kind, asked):
                    per.setdefault(r["epsilon"], []).append(float(r[column]))
            cells.append(" / ".join(f"{mean(v):.3f}" if column != "size" else f"{mean(v):.2f}" for v in per.values()))
        body.append([TITLES[method], kind, "∞" if asked == "inf" else asked, *cells])
    return table(["method", "predictor", "ε of the sets", "coverage", "least of a class", "size", "single"], body)


def counted(t: Table, kinds: Sequence[str]) -> tuple[int, int, int]:
    """Comparisons of method and ε by NLL, tempered, with the mean: lower beyond the interval, higher, and all."""
    found = []
    for method in t.methods:
        for kind in kinds:
            for eps in t.epsilons:
                if scale := t.scale(method, eps, kind):
                    base = t.get(method, eps, "mean", "", "temperature", "clean")
                    found.append(t.less(t.get(method, eps, kind, scale, "temperature", "clean"), base, "nll"))
    known = [i for i in found if i is not None]
    return sum(i.high < 0 for i in known), sum(i.low > 0 for i in known), len(known)


def second(tables: dict[str, Table], sets: Sequence[Row]) -> list[str]:
    """The section on tables: NLL by predictor and ε, and prediction sets."""
    eps = next(iter(tables.values())).epsilons
    body, covered = [], []
    for name, t in tables.items():
        for method in t.methods:
            for kind in ("iterates", "swag", "own"):
                cells = []
                for e in eps:
                    scale = t.scale(method, e, kind)
                    base = t.get(method, e, "mean", "", "temperature", "clean")
                    ours = t.get(method, e, kind, scale, "temperature", "clean") if scale else []
                    cells.append(shown(t.less(ours, base, "nll"), 3))
                body += [[name, TITLES[method], kind, *cells]] if any(cells) else []
        for asked in dict.fromkeys(r["set_epsilon"] for r in sets):
            mine = [r for r in sets if (r["table"], r["set_epsilon"], r["predictor"]) == (name, asked, "mean")]
            cells = [
                " / ".join(f"{mean(float(r[k]) for r in mine if r['epsilon'] == e):.{d}f}" for e in eps)
                for k, d in (("coverage", 3), ("least_class", 2), ("size", 2))
            ]
            covered.append([name, mine[0]["calibrated"], "∞" if asked == "inf" else asked, *cells])
    heads = ["table", "rows", "ε of the sets", "coverage", "least of a class", "size"]
    return [
        *table(["table", "method", "predictor", *(f"ε = {e}" for e in eps)], body),
        "",
        *wrap(SETS, 100),
        "",
        *table(heads, covered),
    ]


def page(t: Table, sets: Sequence[Row] = ()) -> str:
    """README.md."""
    eps = " / ".join(t.epsilons)
    per = [len({r["seed"] for r in t.rows if r["epsilon"] == e}) for e in t.epsilons]
    seeds = str(per[0]) if len(set(per)) == 1 else " / ".join(map(str, per))
    facts = sorted({f"{r['device']}, torch {r['torch']}, commit {r['commit']}" for r in t.rows})
    spent = " / ".join(
        next(f"{float(r['epsilon_spent']):.2f}" for r in t.rows if r["epsilon"] == e) for e in t.epsilons
    )
    words = (HERE / "verdict.md").read_text().strip()
    lines = ["# What a private posterior is worth", "", words, "", "## How", ""]
    methods = ", ".join(TITLES[m] for m in t.methods)
    how = (
        f"From the same trained runs ({methods}; {seeds} seeds; CIFAR-10, the paper's CNN, b = 4,096, 90 epochs, C = 1, "
        f"averaged iterates) every predictor below is made and compared within each run. ε = {eps}; spent with the "
        f"charged maps, by RDP at δ = 1e-5: {spent}. All predictors of a run have the same centre; what differs is "
        "the spread around it ([predictors.py](predictors.py)). Scales are chosen and temperatures fitted on mirrored "
        "training images, not charged, alike for all: this favours draws, which have a scale to choose. Rows marked "
        "as charged are fitted by noisy gradients within the ε above."
    )
    floor = (
        "'Its floor' is the 15-bin ECE that a perfectly calibrated predictor with these probabilities would have on the "
        "same number of images."
    )
    paired = (
        "Paired within runs; 95 % t intervals over seeds, not corrected for their number; bold where they exclude zero. "
        "Lower NLL, ECE and AURC are better."
    )
    joint = "An ensemble is four runs that share the ε of one, so its row compares it with other runs of the same seed number."
    shift = "Means over fifteen corruptions and five severities, all 10,000 test images, 8 draws."
    lines += [
        *wrap(how, 100),
        "",
        *wrap(f"Hardware: {'; '.join(facts)} (`+n`: with changes that were committed with the rows).", 100),
        "",
        *COMMANDS,
        "",
    ]
    lines += [
        f"## Clean images: the mean, its maps, and the method's own draws (ε = {eps})",
        "",
        *levels(t),
        "",
        *wrap(floor, 100),
    ]
    lines += ["", "## Draws less the mean, each with its temperature: clean images", "", *wrap(paired, 100), ""]
    lines += [*differences(t, "clean"), ""]
    if any(r["predictor"] == "ensemble" for r in t.rows):
        lines += [*wrap(joint, 100), ""]
    if any(r["condition"] == "shift" for r in t.rows):
        lines += ["## Under corruption", "", shift, "", *differences(t, "shift"), ""]
    lines += [f"## Out of distribution: AUROC against clean test images (ε = {eps})", "", *ood(t), ""]
    if any(r["predictor"] == "bound" for r in t.rows):
        lines += ["## A larger bound: DP-SGD", "", *wrap(BOUND, 100), "", *bounds(t), ""]
    if (HERE / "results" / "small.csv").is_file():
        small = HERE / "results" / "small.csv"
        facts = sorted({f"{r['device']}, torch {r['torch']}, commit {r['commit']}" for r in read_sets("small.csv")})
        lines += [
            "## Two tables, from strong to weak privacy",
            "",
            *wrap(SMALL, 100),
            "",
            "    python -m experiments.posterior.small",
            "",
        ]
        lines += [
            f"One thread: {'; '.join(facts)}.",
            "",
            *second({n: Table(small, n) for n in TABLES}, read_sets("small-sets.csv")),
            "",
        ]
    if sets:
        eps = " / ".join(dict.fromkeys(r["epsilon"] for r in sets))
        words = (
            "Sets that should hold the true class of 90 % of each class's images ([sets.py](sets.py)): thresholds from half "
            "of the test images under the stated ε of their own, scored on the other half. 'Least of a class' is the "
            "coverage of the class that has least, 'single' the share of sets with one class. The mean has its charged "
            "temperature."
        )
        lines += [f"## Private prediction sets (training at ε = {eps})", "", *wrap(words, 100), "", *covered(sets), ""]
    return "\n".join(lines)


def read_sets(name: str = "sets.csv") -> list[Row]:
    path = HERE / "results" / name
    return list(csv.DictReader(path.read_text().splitlines())) if path.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    a = parser.parse_args()
    text = page(Table(HERE / "results" / "rows.csv"), read_sets())
    if a.check:
        if text != (HERE / "README.md").read_text():
            raise SystemExit("README.md is not what results/rows.csv gives. Run python -m experiments.posterior.")
    else:
        (HERE / "README.md").write_text(text)


if __name__ == "__main__":
    main()
