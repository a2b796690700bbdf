"""Figures beyond the paper's axes: scores by severity, OOD images by method and ε, risk by coverage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpivon.report.figures import STYLE, save
from dpivon.study.results.table import Row, Value
from experiments.paper.figures import log_numbers, new_figure
from experiments.robustness.cells import AVERAGE, Predictor, RobustnessCells, Setting
from experiments.robustness.evaluate import COVERAGES

_MEASURES = {"accuracy": "accuracy", "nll": "NLL (nats)", "ece": "ECE (15 bins)"}
_MOST_COLUMNS = 5


def draw_robustness(rows: Sequence[Row], beyond: Sequence[Row], folder: Path) -> list[Path]:
    """All figures that robustness.csv gives, in ``folder``."""
    import matplotlib

    cells, out = RobustnessCells(rows, beyond), []
    with matplotlib.rc_context(STYLE):
        if cells.corruptions:
            for measure in _MEASURES:
                out.extend(save(severity_figure(cells, measure), folder / f"shift-{measure}"))
        if cells.foreign:
            out.extend(save(foreign_figure(cells), folder / "ood-auroc"))
        if any(row["aurc"] is not None for row in cells.beyond):
            out.extend(save(coverage_figure(cells), folder / "risk-coverage"))
    return out


def severity_figure(cells: RobustnessCells, measure: str) -> Any:
    """One panel per method: the measure, averaged over corruptions, from clean images to the worst severity."""
    levels = [0, *cells.severities]
    figure, axes = _panels(
        cells, lambda p, s: [(float(k), cells.shift(p, s, measure, k)) for k in levels], "severity (0: clean)"
    )
    for axis in axes:
        axis.set_xticks(levels)
    if measure == "nll":
        log_numbers(axes)
    corruptions = ", ".join(c.replace("_", " ") for c in cells.corruptions)
    figure.suptitle(
        f"{_MEASURES[measure]} under shift, mean over {len(cells.corruptions)} corruptions: {_spread(cells)}\n({corruptions})",
        fontsize=11,
    )
    figure.supylabel(_MEASURES[measure], fontsize=10)
    return figure


def coverage_figure(cells: RobustnessCells) -> Any:
    """One panel per method: the error among the share of clean test images that are answered with most confidence."""

    def error(found: Value | None) -> Value | None:
        return None if found is None else Value(1 - found.mean, found.std, found.n)

    def curve(p: Predictor, s: Setting) -> list[tuple[float, Value | None]]:
        names = [(c, f"accuracy_at_{c}") for c in COVERAGES] + [(100, "accuracy")]
        return [(float(c), error(cells.clean(p, s, name))) for c, name in names]

    figure, _ = _panels(cells, curve, "coverage (%)")
    figure.suptitle(
        f"Risk and coverage: the error among the most confident answers, clean test images\n({_spread(cells)})",
        fontsize=11,
    )
    figure.supylabel("error", fontsize=10)
    return figure


def foreign_figure(cells: RobustnessCells) -> Any:
    """One panel per set of OOD images, one line per method, one colour per ε."""
    figure = new_figure(max(8.4, 4.2 * len(cells.foreign) + 1.6), 0.45 * len(cells.methods) + 1.6)  # the legend is wide
    axes = figure.subplots(1, len(cells.foreign), sharey=True, squeeze=False)[0]
    places = {m: len(cells.methods) - 1 - i for i, m in enumerate(cells.methods)}
    for axis, foreign in zip(axes, cells.foreign, strict=True):
        for p in cells.predictors:
            for i, s in enumerate(cells.settings):
                found = cells.ood(p, s, foreign, "auroc_entropy")
                if found is None or math.isnan(found.mean):
                    continue
                at = places[p.method] + 0.5 * (0.5 - i / max(1, len(cells.settings) - 1))
                hollow = {} if p == cells.best_way(p.method) else {"markerfacecolor": "white"}
                colour = _colours(cells)[i]
                axis.errorbar(found.mean, at, xerr=found.std, fmt="o", ms=5, color=colour, elinewidth=0.8, **hollow)
        axis.axvline(0.5, color="#666666", lw=0.8, ls=":")
        axis.set_title(foreign)
        axis.set_xlabel("AUROC by entropy (0.5: chance)")
        axis.set_yticks(list(places.values()), [Predictor(m, AVERAGE).title for m in places])
        axis.grid(alpha=0.25)
    handles, names = _setting_handles(cells)
    more, words = _marker_handles(cells)
    _below(figure, handles + more, names + words)
    figure.suptitle(f"Telling OOD images from test images: {_spread(cells)}", fontsize=11)
    return figure


def _panels(
    cells: RobustnessCells, curve: Callable[[Predictor, Setting], list[tuple[float, Value | None]]], x: str
) -> Any:
    """One panel per method with one curve per ε, and a paler dashed one of its posterior mean where it averages."""
    columns = min(_MOST_COLUMNS, len(cells.methods))
    lines = math.ceil(len(cells.methods) / columns)
    figure = new_figure(2.35 * columns + 0.5, 2.1 * lines + 1.2)
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    axes = [axis for row in grid for axis in row]
    for axis, method in zip(axes, cells.methods, strict=False):
        main = cells.best_way(method)
        for p in (p for p in cells.predictors if p.method == method):
            for s, colour in zip(cells.settings, _colours(cells), strict=True):
                points = [(at, v) for at, v in curve(p, s) if v is not None and math.isfinite(v.mean)]
                if not points:
                    continue
                at, values = zip(*points, strict=True)
                means, stds = [v.mean for v in values], [v.std for v in values]
                look = {"lw": 1.5, "ls": "-"} if p == main else {"lw": 1.1, "ls": "--", "alpha": 0.7}
                axis.plot(at, means, color=colour, **look)
                if p == main:
                    low, high = ([max(0.0, m + k * d) for m, d in zip(means, stds, strict=True)] for k in (-1, 1))
                    axis.fill_between(at, low, high, color=colour, alpha=0.15, lw=0)
        axis.set_title(main.title, fontsize=10)
        axis.grid(alpha=0.25)
    for axis in axes[len(cells.methods) :]:
        axis.set_axis_off()
    for i in range(max(0, len(cells.methods) - columns), len(cells.methods)):
        axes[i].set_xlabel(x)
        axes[i].tick_params(labelbottom=True)
    handles, names = _setting_handles(cells)
    if any(p.way == AVERAGE for p in cells.predictors):
        from matplotlib.lines import Line2D

        handles += [Line2D([], [], color="black"), Line2D([], [], color="black", ls="--", alpha=0.7)]
        names += ["averaged over the posterior, or a point", "posterior mean"]
    _below(figure, handles, names)
    return figure, axes[: len(cells.methods)]


def _colours(cells: RobustnessCells) -> list[Any]:
    from matplotlib import colormaps

    n = len(cells.settings)
    return [colormaps["viridis"](0.85 * i / max(1, n - 1)) for i in range(n)]


def _setting_handles(cells: RobustnessCells) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    handles: list[Any] = [Line2D([], [], color=colour, lw=2.5) for colour in _colours(cells)]
    return handles, [cells.label(s) for s in cells.settings]


def _marker_handles(cells: RobustnessCells) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    if not any(p.way == AVERAGE for p in cells.predictors):
        return [], []
    full = Line2D([], [], color="black", marker="o", ls="")
    hollow = Line2D([], [], color="black", marker="o", ls="", markerfacecolor="white")
    return [full, hollow], ["averaged over the posterior, or a point", "posterior mean"]


def _spread(cells: RobustnessCells) -> str:
    seeds = len({row["seed"] for row in cells.rows})
    return f"mean and standard deviation of {seeds} seeds" if seeds > 1 else "one seed"


def _below(figure: Any, handles: list[Any], names: list[str]) -> None:
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 6), frameon=False, fontsize=9)
