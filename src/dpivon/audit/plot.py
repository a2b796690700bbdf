"""Audited against claimed ε, as a picture. Drawn without pyplot, so no display and no global state is touched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpivon.audit.run import Audit
from dpivon.audit.tier_c import Audited

# Okabe and Ito's palette, told apart by colour-blind readers too.
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#000000", "#F0E442", "#D55E00"]
MARKS = ["o", "s", "^", "D", "v", "P", "X", "*"]
RED = "#D55E00"


def plot(audits: Sequence[Audit], path: Path, broken: Sequence[tuple[str, Audited]] = ()) -> None:
    """Lower bounds by path; ``broken`` are bounds on engines with a sown bug, to show what a failure looks like."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    points = [a for audit in audits for a in audit.audited] + [a for _, a in broken]
    top = 1.6 * max([a.claimed for a in points] + [1.0])
    low = 0.6 * min([a.claimed for a in points if a.claimed > 0] + [1.0])
    axes.fill_between([low, top], [low, top], [3 * top, 3 * top], color=RED, alpha=0.08, lw=0)
    axes.plot([low, top], [low, top], color="#666666", lw=1.2)
    axes.text(low * 1.1, 2.2 * top, "above the line: the claim is refuted", color=RED, fontsize=9)
    single = sorted(
        (a for audit in audits[:1] for a in audit.audited if a.attack == "single releases"), key=lambda a: a.claimed
    )
    if single:
        xs = [a.claimed for a in single]
        axes.plot(
            xs, [a.expected for a in single], color="#999999", ls="--", lw=1, label="expected of a correct engine"
        )
    for i, audit in enumerate(audits):
        colour, mark = COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]
        # Paths agree so well that their marks would hide each other: set them a little apart.
        shift = 1.0 + 0.018 * (i - (len(audits) - 1) / 2)
        for attack, fill in (("single releases", colour), ("own model", "none"), ("one training run", "white")):
            found = [a for a in audit.audited if a.attack == attack]
            axes.plot(
                [a.claimed * shift for a in found],
                [max(a.audited, low * 0.6) for a in found],
                ls="",
                marker=mark,
                ms=6 if attack != "one training run" else 8,
                mfc=fill,
                mec=colour,
                label=audit.path if attack == "single releases" else None,
            )
    if audits and any(a.attack == "one training run" for audit in audits for a in audit.audited):
        axes.plot(
            [], [], ls="", marker="o", ms=8, mfc="white", mec="#666666", label="open: one training run, or own model"
        )
    for name, a in broken:
        at = (a.claimed, min(a.audited, 2.6 * top))
        axes.plot(*at, ls="", marker="x", ms=9, mew=2, color=RED)
        axes.annotate(name, at, xytext=(-9, -3), textcoords="offset points", ha="right", fontsize=8, color=RED)
    axes.set(xscale="log", yscale="log")
    for axis, most in ((axes.xaxis, top), (axes.yaxis, 3 * top)):
        ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low * 0.5 <= t <= most]
        axis.set_ticks(ticks, [f"{t:g}" for t in ticks])
        axis.set_ticks([], minor=True)
    axes.set(xlim=(low, top), ylim=(low * 0.5, 3 * top))
    axes.set_xlabel("claimed ε at δ = 1e-5")
    axes.set_ylabel("audited: ε is at least this")
    axes.set_title("What attackers with canaries can prove, against what is claimed")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    figure.savefig(path, dpi=140)


def finite(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None
