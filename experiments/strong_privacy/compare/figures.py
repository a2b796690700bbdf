"""Scores against ε for every contender, and paired differences as a forest plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dpivon.report.figures import STYLE, legend, save
from dpivon.study.results.summary import MARKERS, MEASURES, colour
from experiments.paper.figures import log_numbers, new_figure
from experiments.strong_privacy.compare.cell import Cell, Contender
from experiments.strong_privacy.compare.field import RAW, TEMPERED, Entry, Field, short
from experiments.strong_privacy.compare.pooled import against_best
from experiments.strong_privacy.compare.scopes import Scope
from experiments.strong_privacy.compare.statistics import interval

_KINDS = {RAW: "raw", TEMPERED: "after the private temperature"}


def draw_comparison(field: Field, where: Sequence[Scope], folder: Path) -> list[Path]:
    """For each scope that has cells: accuracy, NLL and ECE against ε, and the differences from the best baseline."""
    import matplotlib

    out: list[Path] = []
    with matplotlib.rc_context(STYLE):
        for scope in (s for s in where if s.cells):
            for measure in MEASURES:
                out.extend(save(scores_figure(field, scope, measure), folder / f"{scope.name}-{measure}"))
            if (forest := forest_figure(field, scope)) is not None:
                out.extend(save(forest, folder / f"{scope.name}-differences"))
    return out


def scores_figure(field: Field, scope: Scope, measure: str) -> Any:
    """One panel per setting, for the raw score and for that after the temperature, which leaves accuracy alone."""
    settings = sorted(
        {cell.setting for cell in scope.cells}, key=lambda s: (s.network, s.epochs, s.max_grad_norm, s.batch_size)
    )
    tempered = measure != "accuracy" and any(field.total(cell) is not None for cell in scope.cells)
    kinds = [RAW, TEMPERED] if tempered else [RAW]
    panels = [(kind, setting) for kind in kinds for setting in settings]
    columns = _columns(len(settings), len(kinds))
    lines = math.ceil(len(panels) / columns)
    figure = new_figure(max(7.2, 3.3 * columns + 0.6), 2.7 * lines + 1.7)
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
    axes = [axis for line in grid for axis in line]
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    axes = axes[: len(panels)]
    for axis, (kind, setting) in zip(axes, panels, strict=True):
        cells = [cell for cell in scope.cells if cell.setting == setting]
        for number, contender in enumerate(field.contenders):
            _line(axis, field, cells, contender, kind, measure, number)
        axis.set_xscale("log")
        axis.invert_xaxis()
        axis.grid(alpha=0.25)
        _plain_ticks(axis, [field.epsilon(cell) for cell in cells])
        same = [s for s in settings if (s.batch_size, s.max_grad_norm) == (setting.batch_size, setting.max_grad_norm)]
        title = f"b = {setting.batch_size}, C = {setting.max_grad_norm:g}"
        title += f", {setting.network}, {setting.epochs} epochs" if len(same) > 1 else ""
        axis.set_title(title if measure == "accuracy" else f"{title}\n{_KINDS[kind]}", fontsize=10)
        if measure == "ece" and kind == TEMPERED:
            axis.axhline(0.03, color="#666666", lw=0.8, ls=":")
    for axis in axes[-columns:]:
        axis.set_xlabel("ε (RDP), privacy grows →")
    for line in grid:
        line[0].set_ylabel(MEASURES[measure])
    if measure == "nll":
        log_numbers(axes)
    legend(figure, axes, [])
    seeds = sorted({len(e.planned) for cell in scope.cells for e in field.entries[cell].values()})
    runs = f"mean and standard deviation of {' to '.join(str(n) for n in dict.fromkeys((seeds[0], seeds[-1])))} runs"
    figure.suptitle(f"{scope.heading}: {MEASURES[measure]}\n{runs}", fontsize=11)
    return figure


def _columns(settings: int, kinds: int) -> int:
    """A row of panels is one kind of score, as long as that can be."""
    if settings == 1:
        return kinds
    return next((n for n in (3, 2) if settings % n == 0), min(settings, 3))


def forest_figure(field: Field, scope: Scope) -> Any | None:
    """One line per cell: ours less the baseline that validation data prefer, with 95 % intervals."""
    panels: list[tuple[str, str, float, str, tuple[float, ...]]]
    panels = [(RAW, "accuracy", 100.0, "accuracy, points (right is better)", (-2.0, 0.0))]
    panels.append((TEMPERED, "nll", 1.0, "NLL after the temperature (left is better)", (0.0,)))
    entered = {c for cell in scope.cells for c in field.entries[cell]}
    ours = [c for c in field.contenders if c.method == field.ours and not c.variant and c in entered]
    found: dict[tuple[Contender, Cell, str], Any] = {}
    for contender in ours:
        for cell in scope.cells:
            for kind, measure, factor, _, _ in panels:
                each = against_best(field, contender, cell, kind, measure)
                if each:
                    found[contender, cell, measure] = interval([factor * d for d in each.values()])
    cells = sorted({cell for _, cell, _ in found}, key=lambda c: (c.setting, -c.noise_multiplier))
    panels = [p for p in panels if any(measure == p[1] for _, _, measure in found)]
    if not cells:
        return None
    figure = new_figure(3.4 + 3.6 * len(panels), 0.3 * len(cells) + 2.0)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    places = {cell: len(cells) - 1 - i for i, cell in enumerate(cells)}
    for axis, (_, measure, _, title, lines) in zip(axes, panels, strict=True):
        for x in lines:
            axis.axvline(x, color="#666666", lw=0.8, ls="-" if x == 0 else ":")
        for number, contender in enumerate(ours):
            for cell in cells:
                i = found.get((contender, cell, measure))
                if i is None:
                    continue
                at = places[cell] + 0.16 * (1 if number == 0 else -1) * (len(ours) > 1)
                error = [[i.mean - i.low], [i.high - i.mean]] if i.n > 1 else None
                look = {
                    "color": _paint(contender),
                    "markerfacecolor": _paint(contender) if contender.default else "white",
                }
                axis.errorbar(
                    i.mean, at, xerr=error, fmt="o", ms=4.5, elinewidth=1.1, label=_label(field, contender), **look
                )
        axis.set_xlabel(title)
        axis.grid(alpha=0.25, axis="x")
    axes[0].set_yticks(list(places.values()), [_short(field, cell, scope) for cell in places], fontsize=8.5)
    axes[0].set_ylim(-0.7, len(cells) - 0.3)
    legend(figure, axes, [])
    names = " or ".join(Contender(m).title for m in field.baselines)
    figure.suptitle(
        f"{scope.heading}\n{Contender(field.ours).title} less {names}, the better by validation; 95 % intervals",
        fontsize=11,
    )
    return figure


def _line(
    axis: Any, field: Field, cells: Sequence[Cell], contender: Contender, kind: str, measure: str, number: int
) -> None:
    points = []
    for cell in sorted(cells, key=field.epsilon):
        entry: Entry | None = field.entries[cell].get(contender)
        found = None if entry is None else field.summary(entry, kind, measure)
        if found is not None:
            at = field.epsilon(cell) if kind == RAW else field.total(cell) or field.epsilon(cell)
            points.append((at, found))
    if not points:
        return
    ours = contender.method == field.ours and not contender.variant
    paint = _paint(contender) if ours else colour(contender.method, number)
    look: dict[str, Any] = {"color": paint, "lw": 1.8 if ours else 1.3, "ls": _dashes(field, contender)}
    look |= {"markerfacecolor": "white"} if ours and not contender.default else {}
    eps, values = zip(*points, strict=True)
    means, stds = [v.mean for v in values], [v.std for v in values]
    axis.plot(eps, means, marker=MARKERS.get(contender.method, "D"), ms=3.5, label=_label(field, contender), **look)
    low, high = ([max(m + k * s, 1e-6) for m, s in zip(means, stds, strict=True)] for k in (-1, 1))
    axis.fill_between(eps, low, high, color=paint, alpha=0.1, lw=0)


def _dashes(field: Field, contender: Contender) -> Any:
    """A variant is not drawn through, and no two of a method alike: dots, dashes, dashes with a dot, with two, …"""
    if not contender.variant:
        return "-"
    place = [c for c in field.contenders if c.variant and c.method == contender.method].index(contender)
    return ":" if place == 0 else (0, (4, 2) + (1, 2) * (place - 1))


def _label(field: Field, contender: Contender) -> str:
    """Ours stands twice: what is not the default says so."""
    twice = contender.method == field.ours and not contender.default and not contender.variant
    return f"{contender.title}, tuned rate" if twice else contender.title


def _paint(contender: Contender) -> str:
    """Ours: black as shipped, grey and hollow at the rate that was chosen for it."""
    return "black" if contender.default else "#808080"


def _short(field: Field, cell: Cell, scope: Scope) -> str:
    """ε, and what differs between the scope's cells."""
    words = [f"ε = {short(field.total(cell) or field.epsilon(cell))}"]
    for name, letter in (("batch_size", "b"), ("max_grad_norm", "C"), ("epochs", "epochs"), ("network", "")):
        if len({getattr(c.setting, name) for c in scope.cells}) > 1:
            own = getattr(cell.setting, name)
            words.append(f"{own} epochs" if letter == "epochs" else f"{letter} = {own:g}" if letter else own)
    return ", ".join(words)


def _plain_ticks(axis: Any, spent: Sequence[float]) -> None:
    """The studied ε themselves as ticks, where they are far enough apart to be read."""
    from matplotlib.ticker import NullLocator

    places = sorted(math.log(e) for e in spent)
    gaps = [b - a for a, b in pairwise(places)]
    if gaps and min(gaps) > 0.15 * (places[-1] - places[0]):
        axis.set_xticks(spent, [short(e) for e in spent])
        axis.xaxis.set_minor_locator(NullLocator())
