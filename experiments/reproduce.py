"""Train a sample of published cells again, and hold their scores against the committed rows within seed noise.

    python -m experiments.reproduce                              # digits and tables, on a CPU
    python -m experiments.reproduce --parts check --data DATA    # the paper's CNN on CIFAR-10, where there is a GPU

- ``tables``: the default of experiments/tables on two of its tables, the same seeds;
- ``quick``: cells of experiments/paper/results/quick, new seeds;
- ``steady``: DP-Steady as stacked runs and in the ordinary eager loop, on the digits;
- ``check``: on a GPU the cells of experiments/paper/results/paper-check, and DP-Steady in both ways.

Two groups of runs agree where Student's t-test does not tell their means apart, at p = .01 over all comparisons (Holm). The
exit code is 1 otherwise.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats

from dpivon.study.plan.plan import Plan, PlannedRun, read_plan
from dpivon.study.results import table
from dpivon.study.run.runner import run_study
from dpivon.study.run.settings import Settings
from experiments.paper.hooks import HOOKS, run_hooks
from experiments.strong_privacy.compare.statistics import holm
from experiments.tables import data as table_data
from experiments.tables import run as tables_run

HERE = Path(__file__).parent
LEVEL = 0.01
MEASURES = ("accuracy", "nll", "ece", "mc_accuracy", "mc_nll")
STEADY = PlannedRun("dp-steady", 128, 1.0, 1.0, 0, 3.5, {"curvature": "whole-fisher", "trace": 0.25})
Rows = Sequence[dict[str, Any]]


class Comparison(NamedTuple):
    """One score of one cell: the published (or the eager loop's) runs and the new ones."""

    cell: str
    measure: str
    theirs: list[float]
    ours: list[float]

    @property
    def p(self) -> float:
        """Of Student's test; groups that are equal throughout agree, and equal numbers on one side only do not."""
        if sorted(self.theirs) == sorted(self.ours):
            return 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # groups without spread
            found = float(stats.ttest_ind(self.theirs, self.ours, equal_var=True).pvalue)
        return 0.0 if math.isnan(found) else found


def compared(cell: str, theirs: Rows, ours: Rows, measures: Sequence[str] = MEASURES) -> Iterator[Comparison]:
    for measure in measures:
        groups = [[float(r[measure]) for r in rows if r.get(measure) not in (None, "")] for rows in (theirs, ours)]
        if all(groups):
            yield Comparison(cell, measure, *groups)


def tables(work: Path, *, toy: bool) -> Iterator[Comparison]:
    """The default's rows again, with their own seeds."""
    known = json.loads(tables_run.SIGMAS.read_text())
    with (HERE / "tables" / "results" / "final.csv").open(newline="") as file:
        published = list(csv.DictReader(file))
    names = ("wine",) if toy else ("wine", "cancer")
    for job in tables_run.final():
        if job.arm != "default" or job.table not in names or job.epsilon not in ((1.0,) if toy else (1.0, 3.0)):
            continue
        arrays = {f"{p}_{k}": v for p, xy in table_data.make(job.table).items() for k, v in zip("xy", xy, strict=True)}
        np.savez(
            work / f"{job.table}.npz",
            **{k: v.astype(np.float16 if k[-1] == "x" else np.uint8) for k, v in arrays.items()},
        )
        ours = [r for r in tables_run.work((job, work, known)) if r["seed"] and r["iterate"] == "average"]
        keys = {tables_run.key(row) for row in ours}
        theirs = [row for row in published if tables_run.key(row) in keys]
        cell = f"{job.table}, ε = {job.epsilon:g}"
        yield from compared(cell, theirs, ours, ("test_balanced_nll", "test_auc", "test_balanced_accuracy"))


def quick(work: Path, *, toy: bool) -> Iterator[Comparison]:
    """Cells of the digits' study with other seeds."""
    folder = HERE / "paper" / "results" / "quick"
    plan, published = read_plan(folder / "study.json"), table.read(folder / "runs.csv")
    cell = (128, 1.0, 1.0)
    methods = ("dp-ivon-gradsq",) if toy else ("dp-sgd", "dp-adam", "dp-ivon-gradsq")
    runs = [r for r in plan.runs if (r.batch_size, r.noise_multiplier, r.max_grad_norm) == cell and r.method in methods]
    again = tuple(replace(r, seed=10 + s) for r in runs if r.seed == 0 for s in range(2 if toy else 4))
    run_study(replace(plan, runs=again, name="again"), work / "quick", Settings(device="cpu", quiet=True))
    ours = table.read(work / "quick" / "runs.csv")
    for method in methods:
        theirs, mine = ([r for r in rows if r["method"] == method] for rows in (published, ours))
        theirs = [r for r in theirs if tuple(r[k] for k in ("batch_size", "noise_multiplier", "max_grad_norm")) == cell]
        yield from compared(f"digits, {method}", theirs, mine)


def both_ways(plan: Plan, out: Path, settings: Settings) -> tuple[Rows, Rows]:
    """Rows of the ordinary loop and of the stack."""
    run_hooks(plan, out, settings)
    run_study(plan, out, settings)
    return table.read(out / HOOKS), table.read(out / "runs.csv")


def steady(work: Path, *, toy: bool) -> Iterator[Comparison]:
    """DP-Steady stacked and in the eager loop."""
    runs = tuple(replace(STEADY, seed=s) for s in range(2 if toy else 4))
    plan = Plan("steady", "digits", "small", "final", 4 if toy else 15, 1e-4, 8, 0, runs)
    theirs, ours = both_ways(plan, work / "steady", Settings(device="cpu", quiet=True, stack=len(runs)))
    yield from compared("digits, DP-Steady, stack against loop", theirs, ours)


def check(work: Path, data: Path) -> Iterator[Comparison]:
    """The paper's CNN on CIFAR-10: what is published, stacks again, and DP-Steady both ways."""
    folder = HERE / "paper" / "results" / "paper-check"
    plan, published = read_plan(folder / "study.json"), table.read(folder / "runs.csv")
    again = replace(plan, name="again", runs=tuple(replace(r, seed=10 + r.seed) for r in plan.runs))
    settings = Settings(data, quiet=True)
    run_study(again, work / "check", settings)
    ours = table.read(work / "check" / "runs.csv")
    for method in sorted({r["method"] for r in ours}):
        theirs, mine = ([r for r in rows if r["method"] == method] for rows in (published, ours))
        yield from compared(f"CIFAR-10, {method}", theirs, mine)
    runs = tuple(replace(STEADY, batch_size=512, max_grad_norm=10.0, seed=s) for s in range(3))
    theirs, ours = both_ways(replace(plan, name="steady", runs=runs), work / "check-steady", settings)
    yield from compared("CIFAR-10, DP-Steady, stack against loop", theirs, ours)


def lines(found: Sequence[Comparison]) -> tuple[list[str], int]:
    """A Markdown table, and how many comparisons do not agree."""
    adjusted = holm([c.p for c in found])
    out = ["| cell | measure | published | again | p (Holm) | |", "|---|---|---|---|---|---|"]
    for c, p in zip(found, adjusted, strict=True):
        groups = (f"{fmean(g):.4f} ± {pstdev(g):.4f} ({len(g)})" for g in (c.theirs, c.ours))
        out.append(
            f"| {c.cell} | {c.measure} | {' | '.join(groups)} | {p:.2g} | {'agrees' if p > LEVEL else '**differs**'} |"
        )
    return out, sum(p <= LEVEL for p in adjusted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=["tables", "quick", "steady"])
    parser.add_argument("--data", type=Path, help="CIFAR-10, for the part check")
    parser.add_argument("--work", type=Path, help="a folder to go on in")
    parser.add_argument("--toy", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(1)
    work = a.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    found: list[Comparison] = []
    cpu = {"tables": tables, "quick": quick, "steady": steady}
    for part in a.parts:
        found += check(work, a.data) if part == "check" else cpu[part](work, toy=a.toy)
    said, different = lines(found)
    print(*said, "", f"{different} of {len(found)} comparisons differ.", sep="\n", flush=True)
    raise SystemExit(int(different > 0))


if __name__ == "__main__":
    main()
