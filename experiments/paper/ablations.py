"""Variants of a method side by side: what the paper's silent choices are worth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dpivon.study.plan.plan import Plan, shown
from dpivon.study.results.summary import IVON
from dpivon.study.results.table import Cells, Row, Value, Variant, describe, is_of, variants
from experiments.paper.ablation_figure import ablation_figure
from experiments.paper.provenance import provenance

_COLUMNS = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "mc_accuracy": "accuracy, averaged",
    "mc_nll": "NLL, averaged",
    "mc_ece": "ECE, averaged",
    "projected_share": "share of g² < s²",
    "h_median": "median h",
    "std_median": "median σ_v",
}
_TEMPERED = {"tempered_nll": "NLL, tempered", "tempered_ece": "ECE, tempered"}


def by_variant(rows: Sequence[Row]) -> tuple[dict[Variant, Cells], Variant]:
    """The cells of every variant, and the one that the others are held against: the paper's plain method, or else the first."""
    found = variants(rows)
    base = next((v for v in found if v[0] == IVON and v[1] == ""), found[0])
    return {v: Cells([r for r in rows if is_of(r, v)]) for v in found}, base


def draw_ablations(rows: Sequence[Row]) -> Any:
    cells, base = by_variant(rows)
    return ablation_figure(cells, base, {v: describe(v) if v == base else changes(v, base) for v in cells})


def ablations_page(rows: Sequence[Row], *, title: str, plan: Plan | None, command: str) -> str:
    """One table per cell: one line per variant, the difference from :func:`by_variant`'s first beside each score."""
    cells, base = by_variant(rows)
    found = list(cells)
    columns = _COLUMNS | {k: v for k, v in _TEMPERED.items() if any(row.get(k) is not None for row in rows)}
    grid = sorted({(r["batch_size"], r["noise_multiplier"], r["max_grad_norm"]) for r in rows})
    lines = [
        f"# {title}",
        "",
        f"Written by `{command}` from `runs.csv`. " + provenance(rows, plan),
        "",
        f"Mean ± standard deviation over seeds, and in brackets the difference from {describe(base)}.",
        "",
        "![Every variant's differences](figures/ablations.png)",
        "",
    ]
    for b, sigma, c in grid:
        epsilons = [v.mean for key in found if (v := cells[key].get(key[0], b, sigma, c, "epsilon")) is not None]
        lines += [f"## b = {b}, σ = {sigma:g}, C = {c:g}: ε = {max(epsilons):.4g}", ""]
        lines += ["| variant | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
        for variant in found:
            values = [cells[variant].get(variant[0], b, sigma, c, k) for k in columns]
            reference = [cells[base].get(base[0], b, sigma, c, k) for k in columns]
            if any(v is not None for v in values):
                shown = [_shown(v, None if variant == base else r) for v, r in zip(values, reference, strict=True)]
                lines.append(f"| {describe(variant)} | " + " | ".join(shown) + " |")
        lines.append("")
    if plan and plan.assumptions:
        lines += ["## Assumptions", "", *(f"- {note}" for note in plan.assumptions), ""]
    return "\n".join(lines)


def changes(variant: Variant, base: Variant) -> str:
    """What of ``base`` is another in the variant, in words; of another method everything is."""
    if variant[0] != base[0]:
        return describe(variant)
    ours, theirs = (json.loads(options) if options else {} for options in (variant[1], base[1]))
    found = [f"{k} = {shown(v)}" for k, v in ours.items() if k not in theirs or theirs[k] != v]
    found += [f"{k} as by default" for k in theirs if k not in ours]
    if variant[2] != base[2]:
        found.append("a rate for each cell" if variant[2] is None else f"lr {variant[2]:g}")
    return ", ".join(found) or describe(variant)


def _shown(value: Value | None, reference: Value | None) -> str:
    if value is None:
        return ""
    return str(value) if reference is None else f"{value} ({value.mean - reference.mean:+.2g})"
