"""The HTML report of a study: privacy against utility, every cell of the grid, and what the runs reveal together.

It reads the study's table, diagnostics and plan. Seeds and run names stay there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpivon.privacy.accounting import epsilon
from dpivon.privacy.accounting.recorded import STUDY
from dpivon.report.page import Content, Section, versions
from dpivon.report.privacy import Reading
from dpivon.study.results.provenance import check_code
from dpivon.study.results.summary import Tables, in_order, load, privacy_curves, width_curves
from dpivon.study.results.table import Cells, Row, describe, is_of, title_of, variants
from dpivon.study.results.tuning import history

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
