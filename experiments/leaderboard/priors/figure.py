"""The figure of the README: accuracy and NLL on the test set over ε, from scratch and from the prior."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from dpivon.report.figures import STYLE, save
from experiments.leaderboard.priors.arms import ARMS, Results
from experiments.leaderboard.priors.plans import EPSILONS

#: Arm, colour (Okabe and Ito), marker, line; recipe solid and baselines dashed.
LINES = (
    ("scratch", "#999999", "o", "-"),
    ("plain", "#56B4E9", "s", "-"),
    ("dp-steady", "#0072B2", "D", "-"),
    ("dp-sgd", "#D55E00", "^", "--"),
    ("dp-adam", "#009E73", "v", "--"),
)
PANELS = (("accuracy", "test accuracy, %", 100.0), ("tempered_nll", "test NLL after one temperature", 1.0))


def draw(r: Results, path: Path) -> None:
    """Mean over seeds with bars of one standard deviation, as ``path``.png. Points are shifted a little, to be seen."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.4, 4.6), layout="constrained", dpi=110)
        axes: Any = figure.subplots(1, len(PANELS))
        for axis, (column, title, factor) in zip(axes, PANELS, strict=True):
            for i, (arm, colour, marker, line) in enumerate(LINES):
                values = [[factor * v for v in r.values(arm, e, column)] for e in EPSILONS]
                x = [e * 1.025 ** (i - len(LINES) // 2) for e in EPSILONS]
                middle, spread = [mean(v) for v in values], [stdev(v) for v in values]
                look = {"color": colour, "marker": marker, "linestyle": line, "linewidth": 1.2, "markersize": 5}
                axis.errorbar(x, middle, spread, **look, capsize=2, label=ARMS[arm])
            axis.set_xscale("log")
            axis.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
            axis.minorticks_off()
            axis.set_xlabel("ε (δ = 1e-5)")
            axis.set_ylabel(title)
            axis.grid(alpha=0.25)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        save(figure, path)
