"""How wide the posterior is, layer by layer."""

from __future__ import annotations

from dpivon.report.chart import ORANGE, Axis, Chart, Panel, Point, Series, View
from dpivon.report.page import Section
from dpivon.report.run_folder import Layer, RunFolder


def section(run: RunFolder) -> Section:
    title = "Posterior width by layer"
    if not run.layers:
        return Section(
            "width", title, left_out="The model is a point estimate (no posterior.json), so it has no width."
        )
    return Section("width", title, "width.html", {"layers": run.layers}, (chart(run.layers),))


def chart(layers: tuple[Layer, ...]) -> Chart:
    """A row a parameter: the median standard deviation of its weights, on the range that holds 90 % of them."""
    points = tuple(
        Point(layer.sd_median, i, layer.sd_q05, layer.sd_q95, (("weights", f"{layer.numel:,}"),))
        for i, layer in enumerate(layers)
    )
    positive = all(layer.sd_q05 > 0 for layer in layers)
    spread = max(layer.sd_q95 for layer in layers) / min(layer.sd_q05 for layer in layers) if positive else 1.0
    return Chart(
        "width",
        "Posterior standard deviation of the weights",
        "Dots are medians, bars hold 90 % of a layer’s weights. Narrow means that the releases told much about them.",
        Axis("posterior standard deviation σ", log=spread > 5),
        (
            View(
                "σ",
                Axis("", names=tuple(layer.name for layer in layers)),
                (Panel("", (Series("σ of the weights", points, ORANGE, mark="ranges", marker="o"),)),),
            ),
        ),
    )
