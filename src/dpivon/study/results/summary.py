"""What follows from a study's tables: ε by PLD, a summary per cell, charts against ε, rates tried, and the HTML report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dpivon.errors import bad
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.accounting.recorded import STUDY
from dpivon.report.chart import Axis, Chart, Panel, Point, Series, View
from dpivon.report.figures import draw
from dpivon.report.page import Content, Section, versions
from dpivon.report.privacy import Reading, shown
from dpivon.study.plan.plan import Plan, read_plan
from dpivon.study.results import table
from dpivon.study.results.table import (
    CELL,
    SCORES,
    Cells,
    Row,
    check_code,
    describe,
    is_ablation,
    is_of,
    title_of,
    variants,
)
from dpivon.study.results.tuning import candidates, epsilon_with_tuning, history

IVON = "dp-ivon-gradsq"
TITLES = {"dp-sgd": "DP-SGD", "dp-adam": "DP-Adam", IVON: "DP-IVON-Gradsq"}
# Okabe and Ito's palette, which colour-blind readers can distinguish.
COLOURS = {"dp-sgd": "#0072B2", "dp-adam": "#E69F00", IVON: "#D55E00", "dp-steady": "#000000"}
OTHERS = ("#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#666666")
MARKERS = {"dp-sgd": "s", "dp-adam": "^", IVON: "o"}
MEASURES = {"accuracy": "test accuracy", "nll": "test NLL (nats)", "ece": "test ECE (15 bins)"}
DASHES = ("-", "--", ":", "-.")
_X = Axis("ε (RDP), privacy grows →", log=True, reverse=True)
Lines = list[tuple[str, str, bool]]  # column, label, pale


def in_order(methods: Iterable[str]) -> list[str]:
    """The paper's methods first, in its order; the others by name."""
    return sorted(methods, key=lambda m: (m not in TITLES, list(TITLES).index(m) if m in TITLES else 0, m))


def colour(method: str, number: int) -> str:
    """The colour of a method that is the given one in its figure's order."""
    return COLOURS.get(method, OTHERS[number % len(OTHERS)])


def privacy_curves(rows: Sequence[Row]) -> Chart:
    """Accuracy, NLL and ECE against ε on an inverted logarithmic axis, one panel per batch size, one dash per clipping norm."""
    repeated = Counter(tuple(row[k] for k in ("method", "options", "lr", *CELL)) for row in rows)
    spread = (
        "Bands are one standard deviation over repetitions" if max(repeated.values()) > 1 else "Each point is one run"
    )
    views = []
    for measure, label in MEASURES.items():
        log = measure == "nll" and _spans(rows, ("nll", "mc_nll"))
        views.append(View(label, Axis(label, log=log), _panels(rows, partial(_scores, measure))))
    delta = rows[0]["delta"]
    lost = sum(any(row[m] is not None and math.isnan(row[m]) for m in MEASURES) for row in rows)
    diverged = f" {lost} of {len(rows)} runs diverged; the cells that they belong to are not drawn." if lost else ""
    caption = (
        f"ε by RDP at δ = {delta:g}, for each run by itself. {spread}; faint lines are the posterior mean.{diverged}"
    )
    return Chart("curves", "Scores against ε", caption, _X, tuple(views))


def width_curves(rows: Sequence[Row]) -> Chart | None:
    """Posterior width at the end against ε, for the runs that have one."""
    rows = [row for row in rows if row.get("std_median") is not None]
    if not rows:
        return None
    log = _spans(rows, ("std_q05", "std_q95"))
    panels = _panels(rows, lambda cells: [("std_median", "", False)])
    view = View("σ", Axis("posterior σ of a weight", log=log), panels)
    caption = "Median over the weights at the end of training; bands hold 90 % of them."
    return Chart("widths", "Standard deviation of the weights", caption, _X, (view,))


def _panels(rows: Sequence[Row], lines_of: Callable[[Cells], Lines]) -> tuple[Panel, ...]:
    several = is_ablation(rows)
    methods = in_order({row["method"] for row in rows})
    kinds = sorted(variants(rows), key=lambda v: (methods.index(v[0]), v[1], v[2]))
    norms = sorted({row["max_grad_norm"] for row in rows})
    panels = []
    for b in sorted({row["batch_size"] for row in rows}):
        series = []
        for number, kind in enumerate(kinds):
            cells = Cells([row for row in rows if is_of(row, kind) and row["batch_size"] == b])
            name = describe(kind) if several else title_of(kind[0])
            # Variants of one method differ by the other colours.
            look = colour("" if several else kind[0], number if several else methods.index(kind[0]))
            for c, dash in zip(norms, DASHES * len(norms), strict=False):
                for column, label, pale in lines_of(cells):
                    if points := _points(cells, kind[0], b, c, column):
                        groups = (name + label, f"C = {c:g}")[: 2 if len(norms) > 1 else 1]
                        marker = MARKERS.get(kind[0], "D")
                        series.append(Series(", ".join(groups), points, look, "line", dash, marker, pale, groups))
        panels.append(Panel(f"batch size {b}", tuple(series)))
    return tuple(panels)


def _scores(measure: str, cells: Cells) -> Lines:
    """Where predictions are averaged over a posterior too, the posterior mean is the paler line."""
    if all(row[f"mc_{measure}"] is None for row in cells.rows):
        return [(measure, "", False)]
    return [(measure, ", posterior mean", True), (f"mc_{measure}", ", averaged", False)]


def _points(cells: Cells, method: str, b: int, c: float, column: str) -> tuple[Point, ...]:
    found = []
    for sigma in cells.axis("noise_multiplier"):
        x, y = (cells.get(method, b, sigma, c, name) for name in ("epsilon", column))
        if x is None or y is None or not (math.isfinite(x.mean) and math.isfinite(y.mean)):
            continue
        pld, members = cells.get(method, b, sigma, c, "epsilon_pld"), cells.members[method, b, sigma, c]
        notes = [("ε (RDP)", shown(x.mean))]
        notes += [("ε (PLD)", shown(pld.mean))] if pld is not None else []
        notes += [("σ, C, b", f"{sigma:g}, {c:g}, {b}")]
        notes += [("runs", ", ".join(f"{row[column]:.4g}" for row in members if row[column] is not None))]
        low, high = y.mean - y.std, y.mean + y.std
        if column == "std_median":
            edges = [cells.get(method, b, sigma, c, name) for name in ("std_q05", "std_q95")]
            low, high = (y.mean if e is None else e.mean for e in edges)
        elif y.n > 1:
            notes.append(("standard deviation", f"{y.std:.2g}"))
        found.append(Point(x.mean, y.mean, low, high, tuple(notes)))
    return tuple(sorted(found, key=lambda p: p.x))


def _spans(rows: Sequence[Row], columns: Sequence[str]) -> bool:
    """Whether a logarithmic axis is worth it: all positive, over more than a factor of five."""
    values = [v for row in rows for c in columns if (v := row[c]) is not None and math.isfinite(v)]
    return bool(values) and min(values) > 0 and max(values) > 5 * min(values)


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


# ---- the HTML report: it reads the study's table, diagnostics and plan; seeds and run names stay there

READ = ("runs.csv", "diagnostics.csv", STUDY)  # and nothing else of the folder
_COLUMNS = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "mc_accuracy": "accuracy, averaged"}
_COLUMNS |= {"mc_nll": "NLL, averaged", "mc_ece": "ECE, averaged"}

_FACTS = {
    "dataset": "data set", "network": "network", "split": "split", "epochs": "epochs", "train_size": "examples",
    "batch_size": "batch size b", "noise_multiplier": "noise multiplier σ", "max_grad_norm": "clipping norm C",
    "delta": "δ", "mc_samples": "posterior samples of a prediction",
}  # fmt: skip


def content(folder: Path, again: str) -> Content:
    """What the report of a study's folder says; ``again`` is the command that makes it."""
    study = load(folder)
    width = width_curves(study.rows)
    no_width = "" if width else "No run of this study has a posterior, so there is no width to draw."
    no_predictions = "A study keeps scores and not predictions, so these are drawn in the report of a single run only."
    sections = [
        privacy(study),
        Section("curves", "Privacy and utility", "figures.html", {}, (privacy_curves(study.rows),)),
        Section("widths", "Posterior width", "figures.html", {}, (width,) if width else (), left_out=no_width),
        cells(study),
        Section("predictions", "Reliability, risk and coverage, confusion, examples", left_out=no_predictions),
        configuration(study),
        versions(machine_facts(study), again),
    ]
    name = study.plan.name if study.plan is not None else folder.resolve().name
    intro = f"{len(study.rows)} private trainings on {study.rows[0]['dataset'] or 'one data set'}, compared."
    return Content("study", f"Study {name}", intro, headline(study), sections)


def privacy(study: Tables) -> Section:
    """ε of each run by itself, and of all of them together, which is what publishing all costs."""
    delta = max(row["delta"] for row in study.rows)
    spent = sorted({row["epsilon"] for row in study.rows})
    together = [part for row in study.rows for part in history(row)]
    picks = [spent[0], spent[len(spent) // 2], spent[-1]] if len(spent) > 2 else spent
    values = {
        "runs": len(study.rows),
        "delta": delta,
        "readings": [Reading(value, delta) for value in picks],
        "together": Reading(epsilon(together, delta, "rdp"), delta),
    }
    return Section("privacy", "What the runs can reveal about one person", "study-privacy.html", values)


def cells(study: Tables) -> Section:
    """Every cell of the grid as a row."""
    head = ["method", "b", "σ", "C", "runs", "ε (RDP)", "ε (PLD)", *_COLUMNS.values()]
    body = []
    methods = in_order({row["method"] for row in study.rows})
    for variant in sorted(variants(study.rows), key=lambda v: (methods.index(v[0]), v)):
        grid = Cells([row for row in study.rows if is_of(row, variant)])
        for key in grid.keys:
            eps, pld = grid.get(*key, "epsilon"), grid.get(*key, "epsilon_pld")
            scores = [grid.get(*key, column) for column in _COLUMNS]
            start = [describe(variant), f"{key[1]}", f"{key[2]:g}", f"{key[3]:g}", f"{eps.n if eps else 0}"]
            start += [Reading(v.mean, 0.5).shown if v is not None else "" for v in (eps, pld)]
            body.append(start + ["" if v is None else str(v) for v in scores])
    return Section("cells", "Every cell of the grid", "cells.html", {"head": head, "body": body})


def configuration(study: Tables) -> Section:
    """The grid, by what varies in it; the assumptions, in the study's own words. No seeds."""
    rows = study.rows
    facts = {label: _listed(rows, column) for column, label in _FACTS.items()}
    facts = {"methods": "; ".join(describe(v) for v in variants(rows))} | {k: v for k, v in facts.items() if v}
    notes = study.plan.assumptions if study.plan is not None else ()
    planned = len(study.plan.runs) if study.plan is not None else None
    values: dict[str, Any] = {"facts": facts, "notes": notes, "planned": planned, "runs": len(rows)}
    return Section("configuration", "Configuration and assumptions", "study-configuration.html", values)


def machine_facts(study: Tables) -> dict[str, str]:
    seconds = sum(row["seconds"] or 0.0 for row in study.rows)
    facts = {name: _listed(study.rows, name) for name in ("hardware", "precision", "torch")}
    facts |= {"code of the runs": check_code(study.rows, mixed=True).replace("**", "")}
    return facts | {"dpivon of the runs": _listed(study.rows, "version"), "training took": f"{seconds:,.0f} s in all"}


def headline(study: Tables) -> list[tuple[str, str]]:
    rows = study.rows
    spent = [row["epsilon"] for row in rows if math.isfinite(row["epsilon"])]
    reach = f"{Reading(min(spent), 0.5).shown} to {Reading(max(spent), 0.5).shown}" if spent else "∞"
    methods = ", ".join(title_of(m) for m in in_order({row["method"] for row in rows}))
    return [("runs", str(len(rows))), ("ε of a run", reach), ("δ", _listed(rows, "delta")), ("methods", methods)]


def _listed(rows: Sequence[Row], column: str) -> str:
    found = {row.get(column) for row in rows} - {None, ""}
    ordered = sorted(found, key=lambda v: (str(type(v)), v))
    return ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in ordered)
