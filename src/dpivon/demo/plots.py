"""The two pictures of the demonstration. Drawn without pyplot, so no display and no global state is touched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from dpivon.diagnostics import Diagnostics, Row, Spread
from dpivon.metrics import ReliabilityBins, ece, reliability_bins, wilson
from dpivon.posterior import Posterior

# Okabe and Ito's palette, told apart by colour-blind readers too.
BLUE, SKY, ORANGE, VERMILION, GREEN, GREY = "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#666666"
BINS = 15
NOISE_ONLY = math.erf(math.sqrt(0.5))  # P(|z| ≤ 1) for a standard normal z
_STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}


@dataclass(frozen=True, eq=False)
class Panel:
    """Probabilities [n, C] under the title they are shown with."""

    title: str
    probs: Tensor


def reliability_diagram(panels: Sequence[Panel], labels: Tensor, path: Path) -> None:
    """Accuracy against confidence, one panel a method, with the number of examples behind every bar."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        figure = _figure(width=3.3 * len(panels) + 0.3, height=5.5)
        axes = figure.subplots(2, len(panels), sharex=True, sharey="row", height_ratios=[3, 1], squeeze=False)
        tallest = 0
        for i, panel in enumerate(panels):
            bins = reliability_bins(panel.probs, labels, BINS)
            tallest = max(tallest, int(bins.count.max()))
            _draw_bins(axes[0, i], bins)
            axes[0, i].set_title(f"{panel.title}\nECE {ece(panel.probs, labels, BINS):.3f}")
            _draw_counts(axes[1, i], bins)
        axes[0, 0].set_ylabel("accuracy in the bin")
        axes[1, 0].set_ylabel("digits")
        axes[1, 0].set_ylim(0, tallest * 1.3)  # room for the numbers
        handles, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
        figure.suptitle(
            f"When a model says 80%, is it right 80% of the time? {len(labels)} test digits in {BINS} bins of confidence"
        )
        figure.savefig(path, dpi=150)


def _draw_bins(ax: Any, bins: ReliabilityBins) -> None:
    centres, width = _centres(bins)
    ax.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, zorder=3, label="perfectly calibrated")
    columns = zip(centres, bins.count.tolist(), bins.confidence.tolist(), bins.accuracy.tolist(), strict=True)
    x, n, confidence, accuracy = zip(*(column for column in columns if column[1]), strict=True)
    pairs = list(zip(accuracy, confidence, strict=True))
    ax.bar(x, [min(pair) for pair in pairs], width, color=BLUE, edgecolor="white")
    too_sure = [max(c - a, 0.0) for a, c in pairs]
    too_modest = [max(a - c, 0.0) for a, c in pairs]
    gap = {"width": width, "bottom": [min(pair) for pair in pairs], "edgecolor": "white"}
    ax.bar(x, too_sure, **gap, color=ORANGE, hatch="///", label="gap: too confident")
    ax.bar(x, too_modest, **gap, color=SKY, hatch="\\\\\\", label="gap: not confident enough")
    intervals = [wilson(a, k) for a, k in zip(accuracy, n, strict=True)]
    below = [max(a - low, 0.0) for a, (low, _) in zip(accuracy, intervals, strict=True)]
    above = [max(high - a, 0.0) for a, (_, high) in zip(accuracy, intervals, strict=True)]
    ax.errorbar(
        x,
        accuracy,
        yerr=[below, above],
        fmt="o",
        markersize=4,
        color="black",
        elinewidth=1,
        capsize=2.5,
        zorder=4,
        label="accuracy and its 95% interval",
    )
    ax.set(xlim=(0, 1), ylim=(0, 1.03))


def _draw_counts(ax: Any, bins: ReliabilityBins) -> None:
    centres, width = _centres(bins)
    counts = bins.count.tolist()
    ax.bar(centres, counts, width, color=GREY, edgecolor="white")
    for x, n in zip(centres, counts, strict=True):
        if n:
            ax.text(x, n, str(n), ha="center", va="bottom", fontsize=8)
    ax.set_xlabel("confidence")
    ax.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1], ["0", ".2", ".4", ".6", ".8", "1"])


def _centres(bins: ReliabilityBins) -> tuple[list[float], float]:
    edges = bins.edges.tolist()
    return [(a + b) / 2 for a, b in pairwise(edges)], 1 / len(bins.count)


def posterior_width(posterior: Posterior, rows: Sequence[Row], path: Path, *, initial_std: float) -> None:
    """Posterior standard deviation by layer; the curvature h and the projected share over training."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        figure = _figure(width=14.0, height=4.8)
        left, middle, right = figure.subplots(1, 3, width_ratios=[1.3, 1, 1])
        _draw_layers(left, Diagnostics.by_layer(posterior), rows[-1].std.median, initial_std)
        _draw_curvature(middle, rows)
        _draw_projected(right, rows, posterior.num_parameters)
        for ax in (left, middle, right):
            ax.grid(alpha=0.3)
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False, fontsize=9)
        figure.savefig(path, dpi=150)


def _draw_layers(ax: Any, layers: Mapping[str, Spread], median: float, initial: float) -> None:
    # As a change from the start: absolute widths are the same to many digits wherever h has hardly moved.
    names = list(layers)
    y = range(len(names))

    def change(part: str) -> list[float]:
        return [100 * (getattr(spread, part) / initial - 1) for spread in layers.values()]

    ax.hlines(y, change("min"), change("max"), color=BLUE, linewidth=1.2, label="smallest to largest")
    ax.hlines(y, change("p01"), change("p99"), color=SKY, linewidth=6, alpha=0.6, label="1% to 99%")
    ax.plot(change("median"), y, "o", color=VERMILION, markersize=5, label="median")
    ax.set_yticks(y, [name.removeprefix("features.").removeprefix("head.") for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.locator_params(axis="x", nbins=6)
    ax.set_xlabel(f"change of the posterior std since the start ({initial:.4f}), in %")
    ax.set_title(f"Posterior std: median {median:.4f}, {median / initial - 1:+.2%} since the start")


def _draw_curvature(ax: Any, rows: Sequence[Row]) -> None:
    steps = [row.step for row in rows]
    low, high = [row.hess.p01 for row in rows], [row.hess.p99 for row in rows]
    ax.fill_between(steps, low, high, color=GREEN, alpha=0.25, linewidth=0, label="1% to 99%")
    ax.plot(steps, [row.hess.median for row in rows], color=GREEN, label="median")
    ax.ticklabel_format(axis="y", useOffset=False)
    ax.set_xlabel("step")
    ax.set_ylabel("curvature h")
    ax.set_title(f"Curvature: median {rows[0].hess.median:.4f} → {rows[-1].hess.median:.4f}")


def _draw_projected(ax: Any, rows: Sequence[Row], coordinates: int) -> None:
    steps, shares = [row.step for row in rows], [row.projected_share for row in rows]
    window = 20
    recent = [shares[max(0, i + 1 - window) : i + 1] for i in range(len(shares))]
    ax.plot(steps, shares, color=SKY, linewidth=0.8, label="each step")
    ax.plot(steps, [sum(part) / len(part) for part in recent], color=BLUE, label=f"mean of {window}")
    two_sd = 2 * math.sqrt(NOISE_ONLY * (1 - NOISE_ONLY) / coordinates)
    ax.axhspan(
        NOISE_ONLY - two_sd,
        NOISE_ONLY + two_sd,
        color=ORANGE,
        alpha=0.3,
        linewidth=0,
        label="only noise, ±2 sd",
    )
    ax.set_xlabel("step")
    ax.set_ylabel("share of coordinates with g² ≤ s²")
    ax.set_title(f"Curvature target projected to zero: {sum(shares) / len(shares):.1%}")


def _figure(*, width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
