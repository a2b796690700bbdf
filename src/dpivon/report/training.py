"""ε over training, and the held-out scores beside it."""

from __future__ import annotations

import math

from dpivon.report.chart import GREEN, ORANGE, Axis, Chart, Panel, Point, Series, View
from dpivon.report.page import Section
from dpivon.report.run_folder import Evaluation, RunFolder

_HELDOUT = {"heldout_accuracy": "held-out accuracy", "heldout_nll": "held-out NLL (nats)"}


def section(run: RunFolder) -> Section:
    spent = [(e.step, e.epsilon) for e in run.progress if e.epsilon is not None and math.isfinite(e.epsilon)]
    title = "ε over training"
    if not spent:
        return Section("training", title, left_out="progress.jsonl holds no ε, so its course is not drawn.")
    points = tuple(Point(step, epsilon) for step, epsilon in spent)
    epsilon = Chart(
        "epsilon",
        "Privacy spent over training",
        f"ε so far, at δ = {run.summary.delta:g}. It grows with every release and never falls.",
        Axis("step", low=0),
        (View("ε", Axis("ε spent", low=0), (Panel("", (Series("ε", points, ORANGE, marker="o"),)),)),),
    )
    heldout = _heldout(run.progress)
    charts = (epsilon,) if heldout is None else (epsilon, heldout)
    return Section("training", title, "training.html", {"heldout": heldout is not None}, charts)


def _heldout(progress: tuple[Evaluation, ...]) -> Chart | None:
    views = []
    for column, label in _HELDOUT.items():
        points = tuple(Point(e.step, y) for e in progress if (y := getattr(e, column)) is not None)
        if points:
            series = Series(label, points, GREEN, marker="o")
            views.append(View(label, Axis(label), (Panel("", (series,)),)))
    if not views:
        return None
    caption = "Computed from held-out examples without noise: not private, and no part of the model."
    return Chart("heldout", "Scores on held-out data", caption, Axis("step", low=0), tuple(views))
