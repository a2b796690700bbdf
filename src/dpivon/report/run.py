"""The report of one ``dpivon train`` run, section by section."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from pathlib import Path

from dpivon.methods import METHODS
from dpivon.metrics import auroc, balanced_accuracy, ece
from dpivon.privacy.accounting.recorded import LEDGER
from dpivon.report import privacy, testset
from dpivon.report.chart import GREEN, ORANGE, Axis, Chart, Panel, Point, Series, View
from dpivon.report.page import Content, Section, versions
from dpivon.report.run_folder import Layer, RunFolder, read
from dpivon.report.testset import findings, percent

_HELDOUT = {"heldout_accuracy": "held-out accuracy", "heldout_nll": "held-out NLL (nats)"}


def content(folder: Path, again: str) -> Content:
    """What the report of a run's folder says; ``again`` is the command that makes it."""
    run = read(folder)
    summary, checked = run.summary, privacy.check(run)
    seconds = "" if summary.seconds is None else f"{summary.seconds:.1f} s"
    machine = {"hardware": summary.hardware, "steps": summary.path, "training took": seconds, **summary.versions}
    sections = [
        testset.section(run),
        privacy.section(run, checked),
        _training(run),
        testset.examples(run),
        _width(run),
        Section(
            "configuration",
            "Configuration",
            "configuration.html",
            {"config": run.config},
            left_out="" if run.config is not None else "The folder holds no config.yaml.",
            folded=True,
        ),
        Section(
            "choices",
            "Choices that were not made from the data",
            "choices.html",
            {"choices": summary.choices_not_made},
            left_out="" if summary.choices_not_made else "The summary names none.",
            folded=True,
        ),
        _ledger(run),
        replace(versions(machine, again), folded=True),
    ]
    reading = privacy.Reading(checked.epsilon, summary.delta)
    facts = [("ε", reading.shown), ("δ", f"{summary.delta:g}"), ("an attacker guesses right at most", reading.guess)]
    said: dict[str, list[str]] = {
        "warnings": [],
        "findings": ["No test data was given: how good the model is is not known."],
    }
    if run.test is not None:
        t, decision = run.test, summary.decision
        given = decision.labels(t.averaged)
        balanced = balanced_accuracy(t.averaged, t.labels, given)
        facts += [("balanced accuracy", percent(balanced))]
        facts += [("AUROC (chance: 0.5)", f"{auroc(t.averaged, t.labels):.3f}")]
        facts += [("calibration error (ECE)", f"{ece(t.averaged, t.labels):.3f}")]
        said = findings(t.averaged, t.labels, decision, run.classes)
    elif summary.metrics:
        said = {"findings": list(summary.findings), "warnings": list(summary.warnings)}
        for name, key in (
            ("balanced accuracy (mean of the labels)", "mc_decided_balanced_accuracy"),
            ("AUROC (chance: 0.5)", "mc_auroc"),
        ):
            if (mean := summary.metrics.get(key)) is not None:
                facts += [(name, f"{mean:.3f}")]
        if (explained := summary.metrics.get("mc_r2")) is not None:
            facts += [("R² (the mean alone: 0)", f"{explained:.3f}")]
    return Content("run", _title(run), "", facts, sections, testset.confusion_of(run), _unit(run), _about(run), **said)


def _title(run: RunFolder) -> str:
    """The configuration's, or what is predicted from what; never the algorithm alone."""
    about, target = run.summary.about, run.summary.task.target
    if about.title or not about.dataset:
        return about.title or "A private model: what it can do, and what it reveals"
    return f"{about.dataset}: predicting {target}" if target else about.dataset


def _unit(run: RunFolder) -> str:
    """The page's first line."""
    summary = run.summary
    size = "" if summary.dataset_size is None else f" of {summary.dataset_size:,}"
    if summary.unit:
        return f"Unit of privacy: one person{size}, with all their rows (column {summary.unit})."
    return f"Unit of privacy: one row{size} of the data. A person with several rows is protected less."


def _about(run: RunFolder) -> list[tuple[str, str]]:
    summary, about = run.summary, run.summary.about
    method = METHODS[summary.method].title if summary.method in METHODS else summary.method
    model = "; ".join(part for part in (summary.task.inputs, summary.task.network, method) if part)
    rows = [("purpose", about.purpose), ("data", about.dataset), ("responsible", about.responsible)]
    return [(name, value) for name, value in (*rows, ("date", about.date), ("model", model)) if value]


def _training(run: RunFolder) -> Section:
    """ε over training, and the held-out scores beside it."""
    known = ((e.step, e.epsilon) for e in run.progress if e.epsilon is not None and math.isfinite(e.epsilon))
    points = tuple(Point(step, epsilon) for step, epsilon in known)
    title = "ε over training"
    if not points:
        return Section("training", title, left_out="progress.jsonl holds no ε, so its course is not drawn.")
    epsilon = Chart(
        "epsilon",
        "Privacy spent over training",
        f"ε so far, at δ = {run.summary.delta:g}. It grows with every release and never falls.",
        Axis("step", low=0),
        (View("ε", Axis("ε spent", low=0), (Panel("", (Series("ε", points, ORANGE, marker="o"),)),)),),
    )
    views = []
    for column, label in _HELDOUT.items():
        if points := tuple(Point(e.step, y) for e in run.progress if (y := getattr(e, column)) is not None):
            axis = Axis(label, low=0, high=1) if column == "heldout_accuracy" else Axis(label, low=0)
            views.append(View(label, axis, (Panel("", (Series(label, points, GREEN, marker="o"),)),)))
    caption = "Computed from held-out examples without noise: not private, and no part of the model."
    heldout = Chart("heldout", "Scores on held-out data", caption, Axis("step", low=0), tuple(views))
    return Section("training", title, "figures.html", charts=(epsilon, heldout) if views else (epsilon,), folded=True)


def _width(run: RunFolder) -> Section:
    title = "Posterior width by layer"
    if not run.layers:
        left_out = "The model is a point estimate (no posterior.json), so it has no width."
        return Section("width", title, left_out=left_out)
    return Section("width", title, "figures.html", charts=(width_chart(run.layers),), folded=True)


def width_chart(layers: tuple[Layer, ...]) -> Chart:
    """One row per parameter: the median standard deviation of its weights, on the range that holds 90 % of them."""
    points = tuple(
        Point(layer.sd_median, i, layer.sd_q05, layer.sd_q95, (("weights", f"{layer.numel:,}"),))
        for i, layer in enumerate(layers)
    )
    positive = all(layer.sd_q05 > 0 for layer in layers)
    spread = max(layer.sd_q95 for layer in layers) / min(layer.sd_q05 for layer in layers) if positive else 1.0
    return Chart(
        "width",
        "Posterior standard deviation of the weights",
        "Dots are medians, bars hold 90 % of a layer’s weights. Narrow: the releases determined them well.",
        Axis("posterior standard deviation σ", log=spread > 5, low=None if spread > 5 else 0.0),
        (
            View(
                "σ",
                Axis("", names=tuple(layer.name for layer in layers)),
                (Panel("", (Series("σ of the weights", points, ORANGE, mark="ranges", marker="o"),)),),
            ),
        ),
    )


def _ledger(run: RunFolder) -> Section:
    title = "The ledger, and how to check it"
    if run.ledger is None:
        return Section("ledger", title, left_out="The folder holds no ledger, so what was released cannot be checked.")
    values = {
        "digest": run.ledger.digest,
        "same": run.ledger.digest == run.summary.ledger_digest,
        "stated": run.summary.ledger_digest,
        "releases": run.ledger.record.releases,
        "torn": run.ledger.record.torn,
        "show": shlex.join(["dpivon", "ledger", "show", str(run.folder), "--delta", f"{run.summary.delta:g}"]),
        "sum": shlex.join(["sha256sum", str(run.folder / LEDGER)]),
    }
    return Section("ledger", title, "ledger.html", values, folded=True)
