"""Variants of a method at a glance: by how much each moves a score, whatever the privacy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpivon.report.figures import STYLE, legend
from dpivon.study.results.table import Cells, Variant
from experiments.paper.figures import new_figure

MEASURES = {"accuracy": "accuracy", "nll": "NLL (nats)", "ece": "ECE"}


def ablation_figure(cells: Mapping[Variant, Cells], base: Variant, names: Mapping[Variant, str]) -> Any:
    """One panel per measure, one line per variant, one dot per cell: the difference from ``base``, with its spread.

    Averaged over draws where the variant has a posterior, and after the private temperature where every variant has one. A run
    that diverged has no dot.
    """
    import matplotlib

    with matplotlib.rc_context(STYLE):
        return _drawn(cells, base, names)


def _drawn(cells: Mapping[Variant, Cells], base: Variant, names: Mapping[Variant, str]) -> Any:
    from matplotlib import colormaps

    found = [v for v in cells if v != base]
    rows = [r for c in cells.values() for r in c.rows]
    tempered = all(any(r.get("tempered_nll") is not None for r in c.rows) for c in cells.values())
    grid = sorted({(r["noise_multiplier"], r["batch_size"], r["max_grad_norm"]) for r in rows})
    figure = new_figure(11.5, 1.9 + 0.33 * len(found))
    axes = figure.subplots(1, len(MEASURES), sharey=True, squeeze=False)[0]
    colours = [colormaps["viridis"](0.85 * i / max(1, len(grid) - 1)) for i in range(len(grid))]
    for axis, (measure, label) in zip(axes, MEASURES.items(), strict=True):
        for i, (sigma, b, c) in enumerate(grid):
            start, _ = _score(cells[base], base, (b, sigma, c), measure, tempered)
            points = [(*_score(cells[v], v, (b, sigma, c), measure, tempered), line) for line, v in enumerate(found)]
            drawn = [(mean - start, spread, line) for mean, spread, line in points if math.isfinite(mean - start)]
            if drawn:
                x, spread, lines = zip(*drawn, strict=True)
                at = [line + 0.5 * (i / max(1, len(grid) - 1) - 0.5) for line in lines]
                look = {"color": colours[i], "label": _cell(grid, sigma, b, c)}
                axis.errorbar(x, at, xerr=spread, fmt="o", ms=3.5, lw=1, **look)
        axis.axvline(0, color="#666666", lw=0.8, ls=":")
        axis.set_xlabel(f"difference in {label}")
        axis.locator_params(axis="x", nbins=4)
        axis.grid(alpha=0.25)
    _bend(axes[list(MEASURES).index("nll")])
    axes[0].set_yticks(range(len(found)), [names[v] for v in found])
    axes[0].invert_yaxis()
    legend(figure, axes, [])
    how = "averaged over draws, after the temperature" if tempered else "averaged over draws"
    figure.suptitle(f"Against {names[base]}\n{how}; mean and spread of seeds", fontsize=11)
    return figure


def _bend(axis: Any) -> None:
    """Differences beyond 1 on a logarithmic scale: a variant that runs away must not hide the others."""
    low, high = axis.get_xlim()
    if max(-low, high) < 2:
        return
    axis.set_xscale("symlog", linthresh=1)
    ticks = [-100, -10, -1, -0.5, 0, 0.5, 1, 10, 100]
    axis.set_xticks([t for t in ticks if low <= t <= high], [f"{t:g}" for t in ticks if low <= t <= high], minor=False)
    axis.set_xticks([], minor=True)


def _cell(grid: Sequence[tuple[float, int, float]], sigma: float, b: int, c: float) -> str:
    """What tells the cell from the others."""
    sizes, bounds = {g[1] for g in grid}, {g[2] for g in grid}
    more = [*([f"b = {b}"] if len(sizes) > 1 else []), *([f"C = {c:g}"] if len(bounds) > 1 else [])]
    return ", ".join([f"σ = {sigma:g}", *more])


def _score(
    cells: Cells, variant: Variant, at: tuple[int, float, float], measure: str, tempered: bool
) -> tuple[float, float]:
    """Mean and spread, averaged over draws where there are any; NaN where nothing ran."""
    for column in [f"tempered_{measure}"] if tempered else [f"mc_{measure}", measure]:
        value = cells.get(variant[0], *at, column)
        if value is not None:
            return value.mean, value.std
    return math.nan, math.nan
