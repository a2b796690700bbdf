"""What is drawn, as plain values. The page's script and matplotlib read the same, so that they cannot disagree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Of Okabe and Ito's palette, as in the figures of studies.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"


@dataclass(frozen=True)
class Axis:
    """An axis; ``low`` and ``high`` where its ends are fixed, ``names`` where it counts 0, 1, … and each has a name."""

    label: str
    log: bool = False
    reverse: bool = False
    low: float | None = None
    high: float | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Point:
    """A point, its spread (of y; of x in ranges), and what its tip says."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    notes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Series:
    """Points drawn alike.

    ``mark`` is line (with a band for the spread), bars (from zero, with whiskers), ranges (a dot on a horizontal bar) or
    reference (a thin line that is no data). ``groups`` are the entries of the legend that must all be on for it to show.
    """

    name: str
    points: tuple[Point, ...]
    colour: str = BLUE
    mark: str = "line"
    dash: str = "-"
    marker: str = ""
    pale: bool = False
    groups: tuple[str, ...] = ()
    width: float = 0.0  # of bars


@dataclass(frozen=True)
class Panel:
    title: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class View:
    """One choice of what stands on the vertical axis."""

    name: str
    y: Axis
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Chart:
    """A figure: panels that share their axes, in one or several views."""

    id: str
    title: str
    caption: str
    x: Axis
    views: tuple[View, ...]
    zoom: bool = True

    def data(self) -> dict[str, Any]:
        """For the page's script."""
        return {
            "id": self.id,
            "title": self.title,
            "zoom": self.zoom,
            "x": vars(self.x),
            "views": [{"name": v.name, "y": vars(v.y), "panels": [_panel(p) for p in v.panels]} for v in self.views],
        }

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The same numbers as a table: view, panel, series, x, y, low, high."""
        for view in self.views:
            for panel in view.panels:
                for series in panel.series:
                    if series.mark != "reference":
                        for p in series.points:
                            yield (view.name, panel.title, series.name, *map(_digits, (p.x, p.y, p.low, p.high)))


def finite(value: float | None) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if value is not None and math.isfinite(value) else None


def _panel(panel: Panel) -> dict[str, Any]:
    series = []
    for s in panel.series:
        points = [[finite(p.x), finite(p.y), finite(p.low), finite(p.high), p.notes] for p in s.points]
        whole = [p for p in points if p[0] is not None and p[1] is not None]
        series.append({**vars(s), "groups": s.groups or (s.name,), "points": whole})
    return {"title": panel.title, "series": series}


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
