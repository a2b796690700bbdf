"""Charts by matplotlib, for papers and slides. Drawn without pyplot: no display and no global state."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpivon.report.chart import Axis, Chart, Panel, Series
from dpivon.report.page import clean

#: Without frames above and to the right.
STYLE = {"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False}
_ACROSS = 4  # panels in a row
Confusion = tuple[tuple[str, ...], list[list[int]]]


def draw(charts: Sequence[Chart], confusion: Confusion | None, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Each view of each chart, and the confusion matrix, in ``folder``."""
    import matplotlib

    out: list[Path] = []
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a script that the font lacks is drawn as boxes
        for chart in charts:
            for number, view in enumerate(chart.views):
                name = chart.id if len(chart.views) == 1 else f"{chart.id}-{number + 1}"
                out += save(_figure(chart, view.panels, view.y), Path(folder) / name, formats)
        if confusion is not None:
            out += save(_matrix(*confusion), Path(folder) / "confusion", formats)
    return out


def _figure(chart: Chart, panels: Sequence[Panel], y: Axis) -> Any:
    from matplotlib.figure import Figure

    height = 4.0 if not y.names else 1.2 + 0.28 * len(y.names)
    rows = math.ceil(len(panels) / _ACROSS)
    across = math.ceil(len(panels) / rows)
    figure = Figure(figsize=(max(5.2, 4.0 * across), rows * height), layout="constrained", dpi=130)
    grid = figure.subplots(rows, across, sharey=True, squeeze=False)
    axes = list(grid.flat)
    for axis, panel in zip(axes, panels, strict=False):
        _panel(axis, panel, chart.x, y)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis in grid[:, 0]:
        axis.set_ylabel(_plain(y.label))
    if len(panels[0].series) > 1:
        legend(figure, axes[:1], [])
    figure.suptitle(_plain(chart.title), fontsize=11)
    return figure


def draw_panels(panels: Sequence[tuple[Panel, Axis, Axis]], path: Path) -> None:
    """Panels side by side, each with its own x and y axes, as ``path``.png."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.7 * len(panels), 4.8), layout="constrained", dpi=130)
        for axis, (panel, x, y) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _panel(axis, panel, x, y)
            axis.set_ylabel(_plain(y.label))
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False, fontsize=9)
        save(figure, path)


def _panel(axis: Any, panel: Panel, x: Axis, y: Axis) -> None:
    for series in panel.series:
        _series(axis, series)
    axis.set_title(_plain(panel.title))
    axis.set_xlabel(_plain(x.label))
    axis.grid(alpha=0.25)
    if y.log:
        axis.set_yscale("log")
    if x.log:
        axis.set_xscale("log")
    else:
        axis.ticklabel_format(axis="x", useOffset=False)
        axis.locator_params(axis="x", nbins=6)
    axis.set_xlim(left=x.low, right=x.high)
    if y.names:
        axis.set_yticks(range(len(y.names)), [_plain(name) for name in y.names])
        axis.set_ylim(len(y.names) - 0.5, -0.5)
    else:
        axis.set_ylim(bottom=y.low, top=y.high)
    if x.reverse:
        axis.invert_xaxis()


def _series(axis: Any, s: Series) -> None:
    x, y = [p.x for p in s.points], [p.y for p in s.points]
    low = [p.y if p.low is None else p.low for p in s.points]
    high = [p.y if p.high is None else p.high for p in s.points]
    spread = any(p.low is not None for p in s.points)
    look: dict[str, Any] = {"color": s.colour, "alpha": 0.4 if s.pale else 1.0, "label": _plain(s.name)}
    if s.mark == "bars":
        axis.bar(x, y, width=s.width, **look)
        if spread:
            axis.errorbar(x, y, yerr=_whiskers(y, low, high), fmt="none", ecolor="black", elinewidth=1, capsize=2)
    elif s.mark == "ranges":
        lengths = _whiskers(x, [p.x if p.low is None else p.low for p in s.points], high)
        axis.errorbar(x, y, xerr=lengths, fmt="o", ms=4, elinewidth=3, **look)
    else:
        axis.plot(x, y, ls=s.dash, marker=s.marker or None, ms=3.5, lw=0.9 if s.mark == "reference" else 1.5, **look)
        if spread:
            axis.fill_between(x, low, high, color=s.colour, alpha=0.12, lw=0)


def _whiskers(middle: list[float], low: list[float], high: list[float]) -> list[list[float]]:
    """Lengths down and up; rounding must not make one negative."""
    below = [max(0.0, m - v) for m, v in zip(middle, low, strict=True)]
    return [below, [max(0.0, v - m) for m, v in zip(middle, high, strict=True)]]


def _matrix(classes: Sequence[str], counts: list[list[int]]) -> Any:
    from matplotlib.figure import Figure

    size = 1.8 + 0.42 * len(classes)
    figure = Figure(figsize=(size + 0.6, size), layout="constrained", dpi=130)
    axis = figure.subplots()
    shares = [[n / max(1, sum(row)) for n in row] for row in counts]
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for i, row in enumerate(counts):
        for j, n in enumerate(row):
            if n:
                axis.text(
                    j, i, str(n), ha="center", va="center", color="white" if shares[i][j] > 0.5 else "black", fontsize=8
                )
    names = [_plain(name)[:24] for name in classes]
    axis.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("predicted")
    axis.set_ylabel("true")
    axis.set_title("Confusion on the test set")
    return figure


def _plain(text: str) -> str:
    """What can be drawn of a text. matplotlib reads $…$ as mathematics; a class name means its dollars."""
    return str(clean(text)).replace("\n", " ").replace("$", r"\$")


def legend(figure: Any, axes: Sequence[Any], dashes: list[tuple[str, str]]) -> None:
    """Under the figure: each name once, whichever panel it is in, then what the dashes mean."""
    from matplotlib.lines import Line2D

    named: dict[str, Any] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(name, handle)
    handles = list(named.values()) + [Line2D([], [], color="black", ls=dash) for _, dash in dashes]
    names = list(named) + [name for name, _ in dashes]
    entry = 0.7 + 0.075 * max(map(len, names))  # inches that the longest needs
    fit = max(1, min(len(names), int(figure.get_figwidth() / entry)))
    lines = math.ceil(len(names) / fit)
    columns = math.ceil(len(names) / lines)  # as many lines, filled evenly
    figure.set_figheight(figure.get_figheight() + 0.2 * max(0, lines - 4))  # a long legend takes nothing from the axes
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def save(figure: Any, path: Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """``path`` with each ending. No dates and versions in it: the same table gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    silent = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Creator": None, "Producer": None}}
    out = [path.with_name(f"{path.name}.{kind}") for kind in formats]
    for target, kind in zip(out, formats, strict=True):
        figure.savefig(target, metadata=silent[kind])
    return out
