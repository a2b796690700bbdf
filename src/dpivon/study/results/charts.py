"""Scores and posterior widths against ε, as charts: one point per cell of the grid, mean and spread over repetitions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from dpivon.report.chart import Axis, Chart, Panel, Point, Series, View
from dpivon.report.privacy import shown
from dpivon.study.results.cells import CELL, Cells, describe, is_ablation, is_of, title_of, variants
from dpivon.study.results.table import Row

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
