"""The paper's three figures, and three of what its discussion conjectures. Drawn without pyplot: no global state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpivon.report.figures import STYLE, legend, save
from dpivon.study.results.summary import DASHES, IVON, MARKERS, MEASURES, colour, in_order
from dpivon.study.results.table import Cells, Row, Value, title_of

NOISE_ONLY = math.erf(math.sqrt(0.5))  # P(z² < 1): the share that pure noise projects to zero


def draw_figures(
    rows: Sequence[Row], diagnostics: Sequence[Row], folder: Path, formats: Sequence[str] = ("png",)
) -> list[Path]:
    """All figures that the tables give, in ``folder``."""
    import matplotlib

    cells = Cells(rows)
    with matplotlib.rc_context(STYLE):
        figures = {f"privacy-{measure}": privacy_figure(cells, measure) for measure in MEASURES}
        if diagnostics:
            figures["projected-share"] = over_training(rows, diagnostics, "projected_share")
            figures["curvature"] = over_training(rows, diagnostics, "h_median")
            figures["posterior-width"] = width_figure(cells)
        return [path for name, figure in figures.items() for path in save(figure, folder / name, formats)]


def privacy_figure(cells: Cells, measure: str) -> Any:
    """A measure against ε on an inverted logarithmic axis: one panel per batch size, one dash per clipping norm."""
    batches = cells.axis("batch_size")
    figure = new_figure(*_size(batches))
    axes = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    norms = cells.axis("max_grad_norm")
    diverged: list[str] = []
    for axis, b in zip(axes, batches, strict=True):
        for number, method in enumerate(in_order(cells.axis("method"))):
            paint = colour(method, number)
            for c, dash in zip(norms, DASHES, strict=False):
                averaged = cells.get(method, b, cells.axis("noise_multiplier")[0], c, f"mc_{measure}")
                name = title_of(method)
                if averaged is None:
                    lines = [(measure, name, 1.0)]
                else:  # the posterior mean in a paler line under the Monte-Carlo average
                    lines = [(measure, f"{name}, posterior mean", 0.4), (f"mc_{measure}", f"{name}, averaged", 1.0)]
                for column, label, strength in lines:
                    bad = _line(axis, cells, (method, b, c), column, color=paint, ls=dash, alpha=strength, label=label)
                    diverged += [f"{label} at b={b}, C={c:g}"] if bad else []
        axis.set_xscale("log")
        axis.set_title(f"batch size {b}")
        axis.set_xlabel("ε (RDP), privacy grows →")
        axis.grid(alpha=0.25)
    for axis in axes:
        axis.invert_xaxis()
    if measure == "nll":
        log_numbers(axes)
    axes[0].set_ylabel(MEASURES[measure])
    legend(figure, axes, [(f"C = {c:g}", dash) for c, dash in zip(norms, DASHES, strict=False)])
    seeds = len(cells.axis("seed"))
    spread = f"mean and standard deviation of {seeds} seeds" if seeds > 1 else "one seed"
    delta = cells.rows[0]["delta"]
    lost = f"; diverged, not drawn: {', '.join(sorted(set(diverged)))}" if diverged else ""
    figure.suptitle(f"{MEASURES[measure]} against privacy, δ = {delta:g},{_turn(batches)}{spread}{lost}", fontsize=11)
    return figure


def _size(panels: Sequence[Any]) -> tuple[float, float]:
    """Inches; a single panel has room for the legend under it."""
    return max(6.2, 3.6 * len(panels) + 0.6), 3.9 if len(panels) > 1 else 4.6


def _turn(panels: Sequence[Any]) -> str:
    """Where a title goes on in the next line."""
    return "\n" if len(panels) == 1 else " "


def _line(axis: Any, cells: Cells, at: tuple[str, int, float], column: str, **look: Any) -> bool:
    """Draw one curve; True if some of its points are missing because a run diverged."""
    method, b, c = at
    found: list[tuple[float, Value]] = []
    bad = False
    for sigma in cells.axis("noise_multiplier"):
        x, y = (cells.get(method, b, sigma, c, name) for name in ("epsilon", column))
        if x is None or y is None or not math.isfinite(x.mean):
            continue
        if math.isnan(y.mean):
            bad = True
            continue
        found.append((x.mean, y))
    if found:
        eps, values = zip(*found, strict=True)
        means, stds = [v.mean for v in values], [v.std for v in values]
        axis.plot(eps, means, marker=MARKERS.get(method, "D"), ms=3.5, lw=1.5, **look)
        most = math.inf if column.endswith("nll") else 1.0  # a spread of shares ends where shares do
        low, high = ([min(max(m + k * s, 0.0), most) for m, s in zip(means, stds, strict=True)] for k in (-1, 1))
        axis.fill_between(eps, low, high, color=look["color"], alpha=0.12 * look["alpha"], lw=0)
    return bad


def over_training(rows: Sequence[Row], diagnostics: Sequence[Row], column: str) -> Any:
    """One method's projected share or curvature over training: one panel per batch size, one colour per σ. IVON's; where
    there is none, that of the first method that has any."""
    from matplotlib import colormaps

    kept = {d["id"] for d in diagnostics if d[column] is not None}
    methods = [row["method"] for row in rows if row["id"] in kept]
    method = IVON if IVON in methods else next(iter(methods), IVON)
    rows = [row for row in rows if row["method"] == method]
    by_id = {row["id"]: row for row in rows}
    batches = sorted({row["batch_size"] for row in rows})
    sigmas = sorted({row["noise_multiplier"] for row in rows})
    norms = sorted({row["max_grad_norm"] for row in rows})
    figure = new_figure(*_size(batches))
    axes = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    colours = [colormaps["viridis"](0.85 * i / max(1, len(sigmas) - 1)) for i in range(len(sigmas))]
    curves: dict[tuple[int, float, float], dict[float, list[float]]] = {}
    for d in diagnostics:
        row = by_id.get(d["id"])
        if row is not None and d[column] is not None:
            key = (row["batch_size"], row["noise_multiplier"], row["max_grad_norm"])
            curves.setdefault(key, {}).setdefault(d["epoch"], []).append(d[column])
    for (b, sigma, c), points in sorted(curves.items()):
        axis = axes[batches.index(b)]
        epochs = sorted(points)
        values = [sum(points[e]) / len(points[e]) for e in epochs]
        look = {"color": colours[sigmas.index(sigma)], "ls": DASHES[norms.index(c) % len(DASHES)]}
        axis.plot(epochs, values, lw=1.4, label=f"σ = {sigma:g}", **look)
    for axis, b in zip(axes, batches, strict=True):
        axis.set_xscale("log")
        axis.set_title(f"batch size {b}")
        axis.set_xlabel("epoch")
        axis.grid(alpha=0.25)
        if column == "projected_share":
            axis.axhline(NOISE_ONLY, color="#666666", lw=0.8, ls=":", label=f"pure noise, {NOISE_ONLY:.3f}")
    if column != "projected_share":
        log_numbers(axes)
    share = column == "projected_share"
    axes[0].set_ylabel("share of curvature targets" if share else "median of h")
    legend(figure, axes, [(f"C = {c:g}", dash) for c, dash in zip(norms, DASHES, strict=False)])
    figure.suptitle(
        f"Share of curvature targets projected to zero,{_turn(batches)}{title_of(method)}, mean over seeds"
        if share
        else f"Curvature h over training, {title_of(method)},{_turn(batches)}median over weights, mean over seeds",
        fontsize=11,
    )
    return figure


def width_figure(cells: Cells) -> Any:
    """Posterior standard deviation at the end against ε: median, and the range that holds 90 % of the weights."""
    from matplotlib import colormaps

    figure = new_figure(6.4, 4.2)
    axis = figure.subplots()
    batches, norms = cells.axis("batch_size"), cells.axis("max_grad_norm")
    for i, b in enumerate(batches):
        colour = colormaps["viridis"](0.85 * i / max(1, len(batches) - 1))
        for c, dash in zip(norms, DASHES, strict=False):
            found = []
            for sigma in cells.axis("noise_multiplier"):
                got = [cells.get(IVON, b, sigma, c, k) for k in ("epsilon", "std_q05", "std_median", "std_q95")]
                means = [v.mean for v in got if v is not None]
                if len(means) == 4 and all(map(math.isfinite, means)):
                    found.append(means)
            if found:
                eps, low, median, high = zip(*found, strict=True)
                axis.plot(eps, median, color=colour, ls=dash, marker="o", ms=3.5, lw=1.5, label=f"b = {b}")
                axis.fill_between(eps, low, high, color=colour, alpha=0.1, lw=0)
    axis.set_xscale("log")
    log_numbers([axis])
    axis.invert_xaxis()
    axis.grid(alpha=0.25)
    axis.set_xlabel("ε (RDP), privacy grows →")
    axis.set_ylabel("posterior standard deviation of a weight")
    legend(figure, [axis], [(f"C = {c:g}", dash) for c, dash in zip(norms, DASHES, strict=False)])
    figure.suptitle(
        "Posterior width at the end of training, DP-IVON-Gradsq\n(median; bands hold 90 % of the weights)", fontsize=11
    )
    return figure


def new_figure(width: float, height: float) -> Any:
    """Drawn without pyplot, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=130)


def log_numbers(axes: Sequence[Any]) -> None:
    """Logarithmic axes whose ticks are plain numbers, if what is drawn spans a factor of five; else they stay linear."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    values = [float(y) for axis in axes for line in axis.lines for y in line.get_ydata() if y > 0]
    if not values or max(values) < 5 * min(values):
        return
    for axis in axes:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
