"""What follows from a study's tables: ε by PLD, a summary per cell, figures, and the learning rates that were tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpivon.errors import bad
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.accounting.recorded import STUDY
from dpivon.report.figures import draw
from dpivon.study.plan.plan import Plan, read_plan
from dpivon.study.results import table
from dpivon.study.results.cells import CELL, Cells, is_of
from dpivon.study.results.charts import privacy_curves, width_curves
from dpivon.study.results.provenance import check_code
from dpivon.study.results.table import SCORES, Row
from dpivon.study.results.tuning import candidates, epsilon_with_tuning, history


@dataclass(frozen=True)
class Tables:
    """A folder of results: runs, their diagnostics, the plan if it is there, and the tuning that chose their rates."""

    rows: list[Row]
    diagnostics: list[Row]
    plan: Plan | None
    tuned: Sequence[Row] = ()


def load(out: Path) -> Tables:
    """The tables and the plan of a results folder, as they stand there."""
    rows = table.read(out / "runs.csv")
    if not rows:
        raise bad("out", str(out), "holds no runs.csv with a finished run", "Give what `dpivon study run` wrote")
    plan = read_plan(out / STUDY) if (out / STUDY).exists() else None
    return Tables(rows, table.read(out / "diagnostics.csv"), plan)


def read_tables(out: Path, tuning: Path | None = None) -> Tables:
    """The tables of ``out`` with every ε filled in. ``tuning`` is the folder of the study that chose the rates; by default
    OUT-tuning beside it."""
    tables = load(out)
    known: dict[tuple[float, float, int, float], float] = {}
    for row in tables.rows:
        if row["epsilon_pld"] is None:  # the GPU machine need not have dp-accounting
            key = (*history(row)[0], row["delta"])
            if key not in known:
                known[key] = epsilon(history(row), row["delta"], "pld")
            row["epsilon_pld"] = known[key]
    if known:
        table.write(out / "runs.csv", tables.rows)
    return replace(tables, tuned=beside(out, tuning, "tuning", "tuning.csv"))


def write_report(out: Path, tuning: Path | None = None, *, mixed_code: bool = False) -> list[Path]:
    """Write ``summary.csv``, the figures and, with tuning, ``tuning.md``; all that was written.

    Raises:
        ArgumentError: The rows were made by different code, and ``mixed_code`` does not allow it.
    """
    tables = read_tables(out, tuning)
    check_code(tables.rows, mixed=mixed_code)
    charts = [chart for chart in (privacy_curves(tables.rows), width_curves(tables.rows)) if chart is not None]
    drawn = draw(charts, None, out / "figures", ("png",))
    return [*drawn, write_summary(out, tables), *write_tuning(out, tables)]


def write_summary(out: Path, tables: Tables) -> Path:
    """``summary.csv``: per cell settings, ε three ways, and mean and standard deviation of every score."""
    measures = (*SCORES, *(f"mc_{s}" for s in SCORES), "projected_share", "h_median", "std_median")
    columns = ["method", "options", *CELL, "lr", "seeds", "epsilon", "epsilon_pld", "epsilon_with_tuning", "delta"]
    columns += [f"{m}{end}" for m in measures for end in ("", "_std")]
    found = []
    for kind in sorted({(row["method"], row["options"], row["lr"]) for row in tables.rows}):
        cells = Cells([row for row in tables.rows if is_of(row, kind)])
        for key in cells.keys:
            members = cells.members[key]
            worst = max(members, key=lambda r: r["epsilon"])  # one ε a cell: the largest of its runs
            row: Row = {k: worst[k] for k in columns if k in worst and k not in measures} | {"seeds": len(members)}
            if tables.tuned:
                row["epsilon_with_tuning"] = epsilon_with_tuning(worst, tables.tuned)
            for m in measures:
                if (score := cells.get(*key, m)) is not None:
                    row |= {m: score.mean, f"{m}_std": score.std}
            found.append(row)
    table.write(out / "summary.csv", found, tuple(columns))
    return out / "summary.csv"


def beside(out: Path, given: Path | None, kind: str, name: str) -> list[Row]:
    """A table of the study that goes with OUT: of the folder that was given, of OUT itself, or of its neighbour."""
    if given is not None:
        rows = table.read(given / name)
        if not rows:
            raise bad(kind, str(given), f"holds no {name}", f"Give the folder of the {kind} study, or leave it out")
        return rows
    return table.read(out / name) or table.read(out.resolve().with_name(f"{out.resolve().name}-{kind}") / name)


def write_tuning(out: Path, tables: Tables) -> list[Path]:
    """``tuning.md``, where there was tuning: every rate's validation scores, and which was used."""
    tuned = tables.tuned
    if not tuned:
        return []
    used: dict[str, set[float]] = {}
    for row in tables.rows:
        used.setdefault(row["method"], set()).add(row["lr"])
    intro = "Mean validation accuracy and NLL over the tuning grid; the test set was not read."
    lines = ["# Learning rates", "", intro, "", "| method | rate | accuracy | NLL | |", "|---|---|---|---|---|"]
    for method, found in candidates(tuned).items():
        mine = used.get(method, set())
        for i, c in enumerate(found):
            words = ["chosen"] if i == 0 and len(mine) < 2 else []  # not where every cell has its own
            words += ["used in the grid" if len(mine) < 2 else "used in a part of the grid"] if c.lr in mine else []
            lines.append(f"| {method} | {c.lr:g} | {c.accuracy:.4f} | {c.nll:.4f} | {', '.join(words)} |")
    sigmas = sorted({row["noise_multiplier"] for row in tuned})
    lines += ["", "The best rate at each σ alone:", "", "| method | " + " | ".join(f"σ = {s:g}" for s in sigmas) + " |"]
    lines.append("|---" * (len(sigmas) + 1) + "|")
    for method in candidates(tuned):
        best = (candidates([r for r in tuned if r["noise_multiplier"] == s])[method][0].lr for s in sigmas)
        lines.append(f"| {method} | " + " | ".join(f"{lr:g}" for lr in best) + " |")
    lines += [
        "",
        "ε in the tables and figures excludes tuning. `epsilon_with_tuning` in summary.csv composes a run with the "
        "training of every candidate of its method; the held-out images that chose among them are taken to be public.",
    ]
    (out / "tuning.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [out / "tuning.md"]
