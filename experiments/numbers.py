"""The measured numbers of the README and the documentation, from committed tables.

    python -m experiments.numbers            # writes every marked number
    python -m experiments.numbers --check    # fails where a page does not say what its table gives

A number stands between ``<!--n:NAME ARGUMENTS-->`` and ``<!--/n-->``, in a sentence or as lines of a table. NAME is a function
below. Line breaks inside a sentence do not count.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from dpivon.study.results import table
from dpivon.study.results.summary import IVON
from dpivon.study.results.table import Cells
from experiments.leaderboard import board
from experiments.posterior.__main__ import KINDS, TABLES, Row, Table, counted
from experiments.shown import ends, signed, unsigned, within
from experiments.strong_privacy.compare.statistics import Interval
from experiments.strong_privacy.numbers import area, attributed, bar, beside, better, ivon, reached, width
from experiments.tables import default_page

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!--n:([^>]*?)-->)(.*?)(<!--/n-->)", re.DOTALL)
GAINS = ("dp-sgd", "dp-adam", IVON)  # whose own iterates beat their mean at ε = 1 and 3


def pages() -> list[Path]:
    """Where numbers may stand."""
    docs = sorted((ROOT / "docs").glob("*.md"))
    own = ("paper/README.md", "posterior/verdict.md", "robustness/README.md", "strong_privacy/README.md")
    return [ROOT / "README.md", *(ROOT / "experiments" / name for name in own), *docs]


def file(path: str, keys: str, form: str, factor: str = "1") -> str:
    """One number of a JSON file: ``keys`` lead to it, separated by slashes, with underscores for spaces."""
    found = json.loads((ROOT / path).read_text())
    for key in keys.split("/"):
        found = found[int(key) if isinstance(found, list) else key if key in found else key.replace("_", " ")]
    return format(float(factor) * found, form)


def cell(page: str, row: str, column: str) -> str:
    """A cell of a page that another command writes from its table: of the first row that begins so, with these cells."""
    found = (line.strip("| \n").split(" | ") for line in (ROOT / page).read_text().splitlines())
    begins = row.replace("_", " ").split("/")
    return next(cells for cells in found if cells[: len(begins)] == begins)[int(column)]


def fashion(score: str) -> str:
    """Of the recipe on Fashion-MNIST at ε = 1, 3 and 8, from the prior and from scratch."""
    column, factor, digits = {"accuracy": ("accuracy", 100.0, 1), "nll": ("tempered_nll", 1.0, 3)}[score]
    arms = [own for _, own in sorted(board.arms()[1].items())]
    parts = [[fmean(factor * float(row[column]) for row in arm[e]) for arm in arms] for e in (1.0, 3.0, 8.0)]
    shown = [f"{prior:.{digits}f} and {scratch:.{digits}f}" for prior, scratch in parts]
    return f"{', '.join(shown[:2])}, {shown[2]}"


def step(name: str, row: str, key: str, form: str) -> str:
    """One number of a benchmark of steps."""
    return file(f"benchmarks/results/step-{name}.json", f"rows/{row}/{key}", form)


def behind(epsilon: str) -> str:
    """The most points by which DP-IVON-Gradsq, averaged over draws, is behind the best baseline of a cell at ε or above."""
    cells, gaps = Cells(table.read(ROOT / "experiments/paper/results/paper/runs.csv")), []
    for method, *cell in cells.keys:
        spent = cells.get(method, *cell, "epsilon")
        if method == IVON and spent is not None and spent.mean >= float(epsilon):
            theirs = [v.mean for m in ("dp-sgd", "dp-adam") if (v := cells.get(m, *cell, "accuracy")) is not None]
            ours = cells.get(IVON, *cell, "mc_accuracy")
            assert ours is not None
            gaps.append(100 * (max(theirs) - ours.mean))
    return f"{max(gaps):.1f}"


@cache
def posterior() -> Table:
    return Table(ROOT / "experiments/posterior/results/rows.csv")


def differences(
    kinds: Sequence[str],
    methods: Sequence[str],
    column: str,
    factor: float = 1.0,
    epsilons: Sequence[str] = (),
    condition: str = "clean",
) -> list[Interval]:
    """Tempered predictors less the tempered mean, by method, kind and ε."""
    t, found = posterior(), []
    for method in methods:
        for kind in kinds:
            for eps in epsilons or t.epsilons:
                if scale := t.scale(method, eps, kind):
                    ours = t.get(method, eps, kind, scale, "temperature", condition)
                    base = t.get(method, eps, "mean", "", "temperature", condition)
                    if (one := t.less(ours, base, column, factor)) is not None:
                        found.append(one)
    return found


def epsilons() -> str:
    """The ε of the posterior's runs."""
    *most, last = posterior().epsilons
    return f"{', '.join(most)} and {last}"


def iterates(method: str) -> str:
    """Averaged predictions of the iterates less those of the mean: points and NLL, by ε."""
    points, losses = differences(["iterates"], [method], "accuracy", 100.0), differences(["iterates"], [method], "nll")
    shown = " / ".join(within(i, 2) for i in points)
    return f"{shown} points and {' / '.join(signed(i.mean, 3) for i in losses)} of NLL"


def gain(*epsilons: str) -> str:
    """The same over three methods at some ε, as a range with the ends of its intervals."""
    found = differences(["iterates"], GAINS, "accuracy", 100.0, epsilons)
    means = [i.mean for i in found]
    ends = f"[{unsigned(min(i.low for i in found), 1)}, {unsigned(max(i.high for i in found), 1)}]"
    return f"{unsigned(min(means), 1)} to {unsigned(max(means), 1)} points ({ends})"


def draws(side: str, condition: str = "clean", *epsilons: str) -> str:
    """In how many comparisons Gaussian draws have a lower (or higher) NLL than the mean, beyond their interval; at all ε,
    or at these."""
    kinds = [k for k in KINDS if k not in ("iterates", "ensemble")]
    found = differences(kinds, posterior().methods, "nll", 1.0, epsilons, condition)
    beyond = sum(i.high < 0 if side == "lower" else i.low > 0 for i in found)
    return f"{beyond} of {len(found)}" if side == "lower" else str(beyond)


def one(kind: str, method: str, epsilon: str, column: str, digits: str, condition: str = "clean") -> str:
    """A predictor less the mean at one ε, each with its temperature; points for accuracy."""
    factor = 100.0 if column == "accuracy" else 1.0
    (found,) = differences([kind], [method], column, factor, [epsilon], condition)
    return within(found, int(digits))


def small(kind: str, side: str) -> str:
    """In how many comparisons on tables iterates, or Gaussian draws, have a lower (or higher) NLL than the mean."""
    kinds = [kind] if kind in KINDS else [k for k in KINDS if k not in ("iterates", "ensemble")]
    path = ROOT / "experiments/posterior/results/small.csv"
    lower, higher, every = (sum(n) for n in zip(*(counted(Table(path, t), kinds) for t in TABLES), strict=True))
    return f"{lower} of {every}" if side == "lower" else str(higher)


def spread(kind: str, map_: str, column: str, digits: str, charged: str = "0") -> str:
    """The least and the largest mean over seeds of a predictor's score, over methods and ε."""
    t = posterior()
    rows = [t.get(m, e, kind, "", map_, "clean", charged) for m in t.methods for e in t.epsilons]
    return ends([fmean(float(r[column]) for r in some) for some in rows if some], int(digits))


def platt(digits: str) -> str:
    """By how much DP-Platt lowers the NLL of a temperature."""
    t, found = posterior(), []
    for m, e in ((m, e) for m in t.methods for e in t.epsilons):
        one, other = (t.get(m, e, "mean", "", map_, "clean") for map_ in ("temperature", "vector"))
        found.append(fmean(float(r["nll"]) for r in one) - fmean(float(r["nll"]) for r in other))
    return ends(found, int(digits))


def iterates_ece(digits: str, condition: str = "clean", *epsilons: str) -> str:
    """By how much the iterates' ECE is above that of the mean; under corruption, below, for every method."""
    if condition == "clean":
        return ends([i.mean for i in differences(["iterates"], GAINS, "ece", 1.0, epsilons)], int(digits))
    found = differences(["iterates"], posterior().methods, "ece", 1.0, epsilons, condition)
    return ends([-i.mean for i in found], int(digits))


def set_size(epsilon: str, training: str) -> str:
    """How many of CIFAR-10's classes a prediction set of the mean has, by the ε of its thresholds and of training."""
    wanted = {"predictor": "mean", "set_epsilon": epsilon, "epsilon": training}
    with (ROOT / "experiments/posterior/results/sets.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if all(r[k] == v for k, v in wanted.items())]
    return f"{fmean(float(r['size']) for r in rows):.1f}"


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


def lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rows = ["| " + " | ".join(r) + " |" for r in (head, *body)]
    return "\n\n" + "\n".join([rows[0], "|" + "---|" * len(head), *rows[1:]]).replace("|  |", "| |") + "\n\n"


_ALL = (
    file,
    fashion,
    cell,
    step,
    bar,
    reached,
    better,
    behind,
    ivon,
    beside,
    area,
    attributed,
    width,
    epsilons,
    iterates,
    gain,
    draws,
    one,
    small,
    spread,
    platt,
    iterates_ece,
    set_size,
)
_CHOOSING = (door, choice, price, repeated, choosing_table)
_DIGITS = (demo_table, demo_seeds, ema_table, ensemble_table, default_table, shortfall)
NUMBERS: dict[str, Callable[..., str]] = {f.__name__: f for f in (*_ALL, *_CHOOSING, *_DIGITS)}


def written(text: str, where: str = "") -> str:
    """The page with every marked number as its table gives it."""

    def number(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        if name not in NUMBERS:
            raise SystemExit(
                f"{where}: '{name}' is not a number of experiments/numbers.py. Use one of {sorted(NUMBERS)}."
            )
        found = NUMBERS[name](*arguments)
        same = found.split() == match[3].split() if "\n" not in found else found == match[3]
        return match[0] if same else match[1] + found + match[4]

    if text.count("<!--n:") != text.count("<!--/n-->"):
        raise SystemExit(f"{where}: a marked number is not closed by <!--/n-->. Add it.")
    if (first := re.search(r"^ *(<!--n:[^>]*-->)[^\n]", text, re.MULTILINE)) is not None:
        raise SystemExit(f"{where}: {first[1]} begins a line, where Markdown takes it for a block. Begin with a word.")
    return MARKED.sub(number, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page would change")
    a = parser.parse_args()
    for path in pages():
        text = path.read_text()
        made = written(text, path.relative_to(ROOT).as_posix())
        if a.check and made != text:
            raise SystemExit(
                f"{path.relative_to(ROOT)}: is not what its tables give. Run python -m experiments.numbers."
            )
        if not a.check and made != text:
            path.write_text(made)


if __name__ == "__main__":
    main()
