"""The measured numbers of the README and the documentation, from committed tables.

    python -m experiments.numbers            # writes every marked number
    python -m experiments.numbers --check    # fails where a page does not say what its table gives

A number stands between ``<!--n:NAME ARGUMENTS-->`` and ``<!--/n-->``, in a sentence or as lines of a table. NAME is a function
below, or one of the ``MARKS`` of another file. Line breaks inside a sentence do not count.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

from benchmarks import numbers as benchmarks

from dpivon.study.results import table
from dpivon.study.results.summary import IVON
from dpivon.study.results.table import Cells
from experiments import small_numbers
from experiments.leaderboard import board
from experiments.posterior.__main__ import KINDS, TABLES, Table, counted
from experiments.shown import ends, signed, unsigned, within
from experiments.strong_privacy.compare.statistics import Interval
from experiments.strong_privacy.numbers import area, attributed, bar, beside, better, ivon, reached, width

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!--n:([^>]*?)-->)(.*?)(<!--/n-->)", re.DOTALL)
GAINS = ("dp-sgd", "dp-adam", IVON)  # whose own iterates beat their mean at ε = 1 and 3


def pages() -> list[Path]:
    """Where numbers may stand."""
    docs = sorted((ROOT / "docs").glob("*.md"))
    own = ("paper/README.md", "posterior/verdict.md", "robustness/README.md", "strong_privacy/README.md")
    return [ROOT / "README.md", *(ROOT / "experiments" / name for name in own), *docs]


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


_ALL = (
    cell,
    fashion,
    behind,
    bar,
    reached,
    better,
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
NUMBERS: dict[str, Callable[..., str]] = {f.__name__: f for f in (*_ALL, *benchmarks.MARKS, *small_numbers.MARKS)}


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
