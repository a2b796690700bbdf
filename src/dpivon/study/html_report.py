"""The HTML report of a study: privacy against utility, every cell of the grid, and what the runs reveal together.

It reads the study's table, diagnostics and plan. Seeds and run names stay there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dpivon.privacy.accounting import epsilon
from dpivon.privacy.accounting.history import History
from dpivon.report.chart import Axis, Chart, Panel, Point, Series, View
from dpivon.report.figures import draw
from dpivon.report.page import Content, Section, versions
from dpivon.report.privacy import Reading, shown
from dpivon.study.cells import Cells
from dpivon.study.figures import DASHES, MARKERS, MEASURES, colour, draw_figures, in_order, title_of
from dpivon.study.plan import Plan, read_plan
from dpivon.study.report import load
from dpivon.study.table import Row
from dpivon.study.tuning import history
from dpivon.study.variants import describe, is_ablation, is_of, variants

READ = ("runs.csv", "diagnostics.csv", "study.json")
_COLUMNS = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "mc_accuracy": "accuracy, averaged"}
_COLUMNS |= {"mc_nll": "NLL, averaged", "mc_ece": "ECE, averaged"}
_X = Axis("ε (RDP), privacy grows →", log=True, reverse=True)
Lines = list[tuple[str, str, bool]]  # column, label, pale


@dataclass(frozen=True, eq=False)
class StudyFolder:
    folder: Path
    rows: list[Row]
    diagnostics: list[Row]
    plan: Plan | None


def read(folder: Path) -> StudyFolder:
    """The files of ``READ``; a study without a plan is reported from its table alone."""
    rows, diagnostics = load(folder)
    path = folder / "study.json"
    return StudyFolder(folder, rows, diagnostics, read_plan(path) if path.exists() else None)


def content(folder: Path, again: str) -> Content:
    """What the report of a study's folder says; ``again`` is the command that makes it."""
    study = read(folder)
    sections = [
        privacy(study),
        curves(study),
        widths(study),
        cells(study),
        predictions(),
        configuration(study),
        versions(machine_facts(study), again),
    ]
    name = study.plan.name if study.plan is not None else folder.resolve().name
    intro = f"{len(study.rows)} private trainings on {study.rows[0]['dataset'] or 'one data set'}, compared."

    def figures(out: Path, formats: Sequence[str]) -> list[Path]:
        if is_ablation(study.rows):  # the study's own figures would average its variants
            return draw([chart for section in sections for chart in section.charts], None, out, formats)
        return draw_figures(study.rows, study.diagnostics, out, formats)

    return Content("study", f"Study {name}", intro, headline(study), sections, figures)


def privacy(study: StudyFolder) -> Section:
    """ε of each run by itself, and of all of them together, which is what publishing all costs."""
    delta = max(row["delta"] for row in study.rows)
    spent = sorted({row["epsilon"] for row in study.rows})
    together: History = [part for row in study.rows for part in history(row)]
    picks = [spent[0], spent[len(spent) // 2], spent[-1]] if len(spent) > 2 else spent
    values = {
        "runs": len(study.rows),
        "delta": delta,
        "readings": [Reading(value, delta) for value in picks],
        "together": Reading(epsilon(together, delta), delta),
    }
    return Section("privacy", "What the runs can reveal about one person", "study-privacy.html", values)


def curves(study: StudyFolder) -> Section:
    return Section("curves", "Privacy and utility", "curves.html", {}, (privacy_curves(study.rows),))


def widths(study: StudyFolder) -> Section:
    chart = width_curves(study.rows)
    title = "Posterior width"
    if chart is None:
        return Section("widths", title, left_out="No run of this study has a posterior, so there is no width to draw.")
    return Section("widths", title, "widths.html", {}, (chart,))


def cells(study: StudyFolder) -> Section:
    """Every cell of the grid as a row."""
    head = ["method", "b", "σ", "C", "runs", "ε (RDP)", "ε (PLD)", *_COLUMNS.values()]
    body = []
    for variant in sorted(
        variants(study.rows), key=lambda v: (in_order({r["method"] for r in study.rows}).index(v[0]), v)
    ):
        grid = Cells([row for row in study.rows if is_of(row, variant)])
        for key in grid.keys:
            eps, pld = grid.get(*key, "epsilon"), grid.get(*key, "epsilon_pld")
            scores = [grid.get(*key, column) for column in _COLUMNS]
            start = [describe(variant), f"{key[1]}", f"{key[2]:g}", f"{key[3]:g}", f"{eps.n if eps else 0}"]
            start += [Reading(v.mean, 0.5).shown if v is not None else "" for v in (eps, pld)]
            body.append(start + ["" if v is None else str(v) for v in scores])
    return Section("cells", "Every cell of the grid", "cells.html", {"head": head, "body": body})


def predictions() -> Section:
    return Section(
        "predictions",
        "Reliability, risk and coverage, confusion, examples",
        left_out="A study keeps scores and not predictions, so these are drawn in the report of a single run only.",
    )


def configuration(study: StudyFolder) -> Section:
    """The grid, by what varies in it; the assumptions, in the study's own words. No seeds."""
    rows = study.rows
    names = {
        "dataset": "data set",
        "network": "network",
        "split": "split",
        "epochs": "epochs",
        "train_size": "examples",
    }
    names |= {
        "batch_size": "batch size b",
        "noise_multiplier": "noise multiplier σ",
        "max_grad_norm": "clipping norm C",
    }
    names |= {"delta": "δ", "mc_samples": "posterior samples of a prediction"}
    facts = {label: _listed(rows, column) for column, label in names.items()}
    facts = {"methods": "; ".join(describe(v) for v in variants(rows))} | {k: v for k, v in facts.items() if v}
    notes = study.plan.assumptions if study.plan is not None else ()
    planned = len(study.plan.runs) if study.plan is not None else None
    values: dict[str, Any] = {"facts": facts, "notes": notes, "planned": planned, "runs": len(rows)}
    return Section("configuration", "Configuration and assumptions", "study-configuration.html", values)


def machine_facts(study: StudyFolder) -> dict[str, str]:
    seconds = sum(row["seconds"] or 0.0 for row in study.rows)
    facts = {name: _listed(study.rows, name) for name in ("hardware", "precision", "torch")}
    return facts | {"dpivon of the runs": _listed(study.rows, "version"), "training took": f"{seconds:,.0f} s in all"}


def headline(study: StudyFolder) -> list[tuple[str, str]]:
    rows = study.rows
    spent = [row["epsilon"] for row in rows if math.isfinite(row["epsilon"])]
    reach = f"{Reading(min(spent), 0.5).shown} to {Reading(max(spent), 0.5).shown}" if spent else "∞"
    methods = ", ".join(title_of(m) for m in in_order({row["method"] for row in rows}))
    return [("runs", str(len(rows))), ("ε of a run", reach), ("δ", _listed(rows, "delta")), ("methods", methods)]


def _listed(rows: Sequence[Row], column: str) -> str:
    found = {row.get(column) for row in rows} - {None, ""}
    return ", ".join(
        f"{v:g}" if isinstance(v, float) else str(v) for v in sorted(found, key=lambda v: (str(type(v)), v))
    )


# ---- charts


def privacy_curves(rows: Sequence[Row]) -> Chart:
    """Accuracy, NLL and ECE against ε on an inverted logarithmic axis, one panel per batch size, one dash per clipping norm."""
    repeated = max(len(c) for c in _members(rows).values())
    spread = "Bands are one standard deviation over repetitions" if repeated > 1 else "Each point is one run"
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
    return Chart(
        "widths",
        "Standard deviation of the weights",
        "Median over the weights at the end of training; bands hold 90 % of them.",
        _X,
        (view,),
    )


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
                    points = _points(cells, kind[0], b, c, column)
                    if points:
                        groups = (name + label, f"C = {c:g}") if len(norms) > 1 else (name + label,)
                        full = f"{name}{label}" + (f", C = {c:g}" if len(norms) > 1 else "")
                        marker = MARKERS.get(kind[0], "D")
                        series.append(Series(full, points, look, "line", dash, marker, pale, groups))
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
        pld = cells.get(method, b, sigma, c, "epsilon_pld")
        members = [row for row in cells.rows if (row["noise_multiplier"], row["max_grad_norm"]) == (sigma, c)]
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


def _members(rows: Sequence[Row]) -> dict[tuple[object, ...], list[Row]]:
    out: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = tuple(row[k] for k in ("method", "options", "lr", "batch_size", "noise_multiplier", "max_grad_norm"))
        out.setdefault(key, []).append(row)
    return out


def _spans(rows: Sequence[Row], columns: Sequence[str]) -> bool:
    """Whether a logarithmic axis is worth it: all positive, over more than a factor of five."""
    values = [v for row in rows for c in columns if (v := row[c]) is not None and math.isfinite(v)]
    return bool(values) and min(values) > 0 and max(values) > 5 * min(values)
