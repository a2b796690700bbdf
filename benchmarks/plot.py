"""Plots of committed benchmark results.

python -m benchmarks.plot      # reads benchmarks/results/*.json, writes PNGs beside them
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent / "results"
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"


def stacked(path):
    facts = json.loads(path.read_text())
    rows = facts["rows"]
    figure, axis = plt.subplots(figsize=(7.5, 4.2), dpi=150)
    for batch, colour, marker in ((128, GREY, "s"), (256, ORANGE, "^"), (512, BLUE, "o")):
        points = sorted(
            (r["runs"] * r["batch"], r["examples_per_s"] / 1e6, r["runs"]) for r in rows if r["batch"] == batch
        )
        if points:
            axis.plot(
                [p[0] for p in points], [p[1] for p in points], marker, ls="-", color=colour, label=f"batch {batch}"
            )
            for size, rate, runs in points:
                axis.annotate(
                    f"{runs} run{'s' * (runs > 1)}",
                    (size, rate),
                    textcoords="offset points",
                    xytext=(-12, 8) if batch == 512 else (8, -3),
                    fontsize=8,
                )
    for rate, words in ((1.2, "aim: 1.2 million a second"), (2.0, "to be proud of: 2 million")):
        axis.axhline(rate, ls=":", color="black", lw=1)
        axis.text(130, rate + 0.02, words, fontsize=8)
    axis.set_xscale("log")
    axis.set_ylim(0, 2.2)
    axis.set_xlabel("examples in a step, over all runs")
    axis.set_ylabel("million examples a second")
    axis.set_title(f"Whole private steps of the paper's CNN on one {facts['hardware'].replace('NVIDIA ', '')}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"))


def step(path):
    from benchmarks.step import CONTENDERS

    facts = json.loads(path.read_text())
    rows = facts["rows"]
    names = list(rows)[::-1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 0.45 * len(names) + 1.6), dpi=150, sharey=True)
    colours = [BLUE if n.startswith("ours") else ORANGE if n.startswith("opacus") else GREY for n in names]
    for axis, key, label in ((left, "ms", "milliseconds a step"), (right, "peak_mb", "peak memory, MB")):
        values = [rows[n][key] for n in names]
        bars = axis.barh([CONTENDERS[n] for n in names], values, color=colours)
        axis.bar_label(
            bars,
            [f"{v:.0f}" if v >= 20 else f"{v:.1f}" if v >= 3 else f"{v:.2f}" for v in values],
            padding=3,
            fontsize=8,
        )
        axis.set_xlabel(label)
        axis.set_xlim(0, max(values) * 1.15)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    figure.suptitle(f"{facts['model']}, batch {facts['batch']}, {facts['hardware']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"))


def scaling(path):
    facts = json.loads(path.read_text())
    figure, axes = plt.subplots(1, len(facts["sweeps"]), figsize=(10.5, 3.6), dpi=150)
    for axis, (name, sweep) in zip(axes, facts["sweeps"].items(), strict=True):
        sizes, times = sweep["size"], sweep["ms"]
        axis.plot(sizes, times, "o-", color=BLUE, label="measured")
        last = [times[-1] * s / sizes[-1] for s in sizes]
        axis.plot(sizes, last, ls="--", color=GREY, label="in proportion")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(
            sizes, [f"{s / 1e6:.2g} M" if s >= 1e5 else f"{s / 1e3:.0f} k" if s >= 1e4 else str(s) for s in sizes]
        )
        axis.set_yticks(times, [f"{t:.0f}" if t >= 20 else f"{t:.2g}" for t in times])
        axis.minorticks_off()
        axis.set_xlabel({"batch": "batch", "parameters": "parameters", "runs": "stacked runs"}[name])
        axis.set_title(f"cost ∝ size^{sweep['exponent']:.2f}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("milliseconds a step")
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"How the cost of a private step grows, {facts['hardware']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"))


PLOTS = {"stacked": stacked, "scaling": scaling, "step": step}

if __name__ == "__main__":
    for file in sorted(FOLDER.glob("*.json")):
        plot = PLOTS.get(file.stem.split("-")[0])
        if plot is not None:
            plot(file)
            print(file.with_suffix(".png"))
