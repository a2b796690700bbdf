"""Variants of a method side by side: what the paper's silent choices are worth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dpivon.methods import METHODS
from dpivon.study.ablation_figure import Variant, ablation_figure
from dpivon.study.cells import Cells, Value
from dpivon.study.figures import IVON
from dpivon.study.made import made
from dpivon.study.plan import Plan, shown
from dpivon.study.table import Row

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


def variants(rows: Sequence[Row]) -> list[Variant]:
    """Every (method, options, learning rate) of the table, in its order."""
    return list(dict.fromkeys((row["method"], row["options"], row["lr"]) for row in rows))


def is_ablation(rows: Sequence[Row]) -> bool:
    """Whether some method stands in several variants, so that its cells must not be averaged together."""
    found = variants(rows)
    return len({method for method, _, _ in found}) < len(found)


def by_variant(rows: Sequence[Row]) -> tuple[dict[Variant, Cells], Variant]:
    """The cells of every variant, and the one that the others are held against."""
    found = variants(rows)
    base = next((v for v in found if v[0] == IVON and v[1] == ""), found[0])
    return {v: Cells([r for r in rows if (r["method"], r["options"], r["lr"]) == v]) for v in found}, base


def draw_ablations(rows: Sequence[Row]) -> Any:
    cells, base = by_variant(rows)
    one_rate = len({lr for _, _, lr in cells}) == 1
    return ablation_figure(
        cells, base, {v: describe(v).removesuffix(f", lr {v[2]:g}" if one_rate else "") for v in cells}
    )


def ablations_page(rows: Sequence[Row], *, title: str, plan: Plan | None) -> str:
    """A table a cell of the grid: a line a variant, the difference from the plain method beside each score."""
    cells, base = by_variant(rows)
    found = list(cells)
    grid = sorted({(r["batch_size"], r["noise_multiplier"], r["max_grad_norm"]) for r in rows})
    lines = [
        f"# {title}",
        "",
        "Written by `dpivon study report` from `runs.csv`. " + made(rows, plan),
        "",
        f"Mean ± standard deviation over seeds, and in brackets the difference from {describe(base)}.",
        "",
        "![Every variant's differences](figures/ablations.png)",
        "",
    ]
    for b, sigma, c in grid:
        epsilons = [v.mean for key in found if (v := cells[key].get(key[0], b, sigma, c, "epsilon")) is not None]
        lines += [f"## b = {b}, σ = {sigma:g}, C = {c:g}: ε = {max(epsilons):.4g}", ""]
        lines += ["| variant | " + " | ".join(_COLUMNS.values()) + " |", "|---" * (len(_COLUMNS) + 1) + "|"]
        for variant in found:
            values = [cells[variant].get(variant[0], b, sigma, c, k) for k in _COLUMNS]
            reference = [cells[base].get(base[0], b, sigma, c, k) for k in _COLUMNS]
            if any(v is not None for v in values):
                shown = [_shown(v, None if variant == base else r) for v, r in zip(values, reference, strict=True)]
                lines.append(f"| {describe(variant)} | " + " | ".join(shown) + " |")
        lines.append("")
    if plan and plan.assumptions:
        lines += ["## Assumptions", "", *(f"- {note}" for note in plan.assumptions), ""]
    return "\n".join(lines)


def describe(variant: Variant) -> str:
    """A variant in words: its method, what of it was changed, and its learning rate."""
    method, options, lr = variant
    changes = ", ".join(f"{k} = {shown(v)}" for k, v in json.loads(options).items()) if options else ""
    return f"{METHODS[method].title if method in METHODS else method}{', ' + changes if changes else ''}, lr {lr:g}"


def _shown(value: Value | None, reference: Value | None) -> str:
    if value is None:
        return ""
    return str(value) if reference is None else f"{value} ({value.mean - reference.mean:+.2g})"
