"""How good and how honest the predictions are: scores, reliability, risk against coverage, confusion, examples, sentences."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpivon.decisions import Decision
from dpivon.metrics import (
    ClassScores,
    accuracy,
    adaptive_ece,
    aurc,
    auroc,
    average_precision,
    balanced_accuracy,
    brier,
    class_scores,
    ece,
    majority_accuracy,
    nll,
    reliability_bins,
    risk_coverage,
    wilson,
)
from dpivon.report.chart import BLUE, GREY, ORANGE, Axis, Chart, Panel, Point, Series, View
from dpivon.report.page import Section
from dpivon.report.run_folder import RunFolder, TestSet

BINS, MOST_POINTS, MOST_CLASSES, MOST_EXAMPLES = 15, 200, 20, 12
_SCORES = (
    ("accuracy", accuracy, "of the most probable class; higher is better"),
    ("accuracy of a constant answer", majority_accuracy, "always the most frequent class: what accuracy has to exceed"),
    ("balanced accuracy", balanced_accuracy, "mean recall of the classes; a constant answer has 1 over their number"),
    ("AUROC", auroc, "mean over the classes; 0.5 is chance"),
    ("average precision", average_precision, "mean over the classes; chance is a class’s share"),
    ("NLL (nats)", nll, "lower is better"),
    ("Brier score", brier, "0 to 2, lower is better"),
    (f"ECE ({BINS} bins)", ece, "lower is better"),
    ("adaptive ECE", adaptive_ece, "lower is better"),
    ("AURC", aurc, "area under the risk–coverage curve, lower is better"),
)
_OF_LABEL = ("share", "sensitivity", "specificity", "auroc", "average_precision", "nll", "ece")


def section(run: RunFolder) -> Section:
    title = "On the test set"
    if run.test is None:
        if run.summary.metrics:
            known = {"metrics": run.summary.metrics, "by_label": run.summary.by_label, "columns": _OF_LABEL}
            return Section("test", title, "metrics.html", known)
        left_out = "No test data was given, so there are no scores and no diagrams of them."
        return Section("test", title, left_out=left_out)
    t = run.test
    scores = [(name, score(t.averaged, t.labels), score(t.mean, t.labels), better) for name, score, better in _SCORES]
    decision = run.summary.decision
    values: dict[str, Any] = {"scores": scores, "n": len(t.labels), "same": torch.equal(t.averaged, t.mean)}
    values |= {"by_class": by_class(t, run.classes, decision), "decision": decision.sentences(run.classes)}
    values |= confusion(t, run.classes, decision)
    return Section("test", title, "test.html", values, (reliability(_both(t), t.labels), risk(t)))


def by_class(t: TestSet, classes: tuple[str, ...], decision: Decision) -> list[list[str]]:
    """A row of the table of classes: name, counts, and scores, a dash where one is not defined."""
    s = class_scores(t.averaged, t.labels, decision.labels(t.averaged))
    shares = s.count / len(t.labels)
    scores = (s.recall, s.precision, s.auroc, s.average_precision, s.mean_probability, shares)
    return [
        [name, f"{int(s.count[k])}", f"{int(s.predicted[k])}"]
        + ["–" if math.isnan(v := float(score[k])) else f"{v:.3f}" for score in scores]
        for k, name in enumerate(classes)
    ]


def _both(t: TestSet) -> tuple[tuple[str, Tensor, str], ...]:
    """A point estimate has one prediction, and is drawn once."""
    if torch.equal(t.averaged, t.mean):
        return (("prediction", t.averaged, ORANGE),)
    return (("averaged over the posterior", t.averaged, ORANGE), ("posterior mean", t.mean, BLUE))


def reliability(predictions: Sequence[tuple[str, Tensor, str]], labels: Tensor) -> Chart:
    """One panel per (name, probabilities, colour): :func:`dpivon.metrics.reliability_bins` with Wilson's 95 % intervals."""
    panels = []
    diagonal = Series("perfectly calibrated", (Point(0, 0), Point(1, 1)), GREY, mark="reference", dash="--")
    for name, probs, colour in predictions:
        bins = reliability_bins(probs, labels, BINS)
        right, share = [], []
        columns = (bins.edges[:-1], bins.edges[1:], bins.count, bins.confidence, bins.accuracy)
        for left, end, count, sure, correct in zip(*(c.tolist() for c in columns), strict=True):
            if not count:
                continue
            low, high = wilson(correct, int(count))
            notes = (("mean confidence", f"{sure:.4f}"), ("examples", f"{int(count)}"))
            right.append(Point((left + end) / 2, correct, max(0.0, low), max(correct, min(1.0, high)), notes))
            share.append(Point((left + end) / 2, count / len(labels), notes=notes))
        panels.append(
            Panel(
                f"{name}: ECE {ece(probs, labels, BINS):.4f}",
                (
                    Series("share of the examples", tuple(share), GREY, mark="bars", pale=True, width=1 / BINS),
                    Series("accuracy in the bin", tuple(right), colour, mark="bars", width=0.7 / BINS),
                    diagonal,
                ),
            )
        )
    return Chart(
        "reliability",
        "Reliability",
        "Examples by the probability of the predicted class. Bars on the dashed line are honest: below it the model is "
        "too sure, above it too modest. Whiskers are 95 % intervals.",
        Axis("confidence", low=0, high=1),
        (View("accuracy", Axis("accuracy", low=0, high=1), tuple(panels)),),
        zoom=False,
    )


def risk(t: TestSet) -> Chart:
    """Error among the most confident examples against their share, thinned to be drawn; AURC is of all of them."""
    series: list[Series] = []
    for name, probs, colour in _both(t):
        coverage, error = risk_coverage(probs, t.labels)
        n = len(coverage)
        at = sorted({round(i) for i in torch.linspace(0, n - 1, min(n, MOST_POINTS)).tolist()})
        points = tuple(Point(float(coverage[i]), float(error[i]), notes=(("answered", f"{i + 1} of {n}"),)) for i in at)
        series.append(
            Series(f"{name}, AURC {aurc(probs, t.labels):.4f}", points, colour, dash="-" if not series else "--")
        )
    return Chart(
        "risk-coverage",
        "Risk against coverage",
        "If the model answers only where it is surest: how often it is wrong, by the share of examples that it answers. "
        "A curve that falls to the left means that its confidence can be used.",
        Axis("share of the examples answered", low=0, high=1),
        (View("error", Axis("error rate among them", low=0), (Panel("", tuple(series)),)),),
    )


def counts(t: TestSet, k: int, decision: Decision) -> Tensor:
    """Examples by true class and answer, [k, k]; without those that got none."""
    given = decision.labels(t.averaged)
    return torch.bincount((t.labels * k + given)[given >= 0], minlength=k * k).reshape(k, k)


def confusion(t: TestSet, classes: tuple[str, ...], decision: Decision) -> dict[str, Any]:
    """The confusion matrix; with many classes only the most frequent mistakes."""
    k = len(classes)
    found = counts(t, k, decision)
    abstained = len(t.labels) - int(found.sum())
    if k <= MOST_CLASSES:
        shares = found / found.sum(1, keepdim=True).clamp_min(1)
        level = (shares * 10).ceil().long().clamp(0, 10)
        matrix = [list(zip(row, shade, strict=True)) for row, shade in zip(found.tolist(), level.tolist(), strict=True)]
        return {"classes": classes, "matrix": matrix, "mistakes": [], "abstained": abstained}
    wrong = found.clone().fill_diagonal_(0).flatten()
    order = wrong.argsort(descending=True, stable=True)[:MOST_CLASSES].tolist()
    mistakes = [(classes[i // k], classes[i % k], int(wrong[i])) for i in order if wrong[i] > 0]
    return {"classes": classes, "matrix": [], "mistakes": mistakes, "abstained": abstained}


def confusion_of(run: RunFolder) -> tuple[tuple[str, ...], list[list[int]]] | None:
    """The matrix for a figure, if there are few enough classes to read it."""
    if run.test is None or len(run.classes) > MOST_CLASSES:
        return None
    return run.classes, counts(run.test, len(run.classes), run.summary.decision).tolist()


def examples(run: RunFolder) -> Section:
    """The test examples that the model is surest and least sure of."""
    title = "Most and least certain test examples"
    if run.test is None:
        left_out = "No test data was given, and examples of no other data are ever shown."
        if run.summary.metrics:
            left_out = "Predictions are not in the folder, so no examples are shown."
        return Section("examples", title, left_out=left_out)
    t = run.test
    entropy = -(t.averaged.double().clamp_min(1e-300).log() * t.averaged.double()).sum(1)
    places = torch.tensor(t.index) if t.images is not None else torch.arange(len(t.labels))
    order = places[entropy[places].argsort(stable=True)].tolist()
    half = min(MOST_EXAMPLES, (len(order) + 1) // 2)
    images = dict(zip(t.index, t.images, strict=True)) if t.images is not None else {}
    surest, least = (
        [_example(t, i, run.classes, images) for i in part] for part in (order[:half], order[half:][::-1][:half])
    )
    groups = {"groups": (("Most certain", surest), ("Least certain", least))}
    return Section("examples", title, "examples.html", groups, folded=True)


def _example(t: TestSet, i: int, classes: tuple[str, ...], images: dict[int, Any]) -> dict[str, Any]:
    probability, predicted = t.averaged[i].max(0)
    return {
        "index": i,
        "true": classes[int(t.labels[i])],
        "predicted": classes[int(predicted)],
        "right": int(predicted) == int(t.labels[i]),
        "probability": float(probability),
        "image": _png(images[i]) if i in images else "",
    }


def _png(pixels: np.ndarray[Any, Any]) -> str:
    """As a data address; small images are enlarged without smoothing, so that their pixels can be seen."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels))
    times = max(1, 64 // max(image.size))
    file = io.BytesIO()
    size = (image.width * times, image.height * times)
    image.resize(size, Image.Resampling.NEAREST).save(file, "png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


_FEW = 6  # classes that are all named
_CONSTANT = 0.55  # balanced accuracy of a label up to which it is hardly recognised
_USEFUL = 0.6  # AUROC from which another threshold is worth naming


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def findings(probs: Tensor, labels: Tensor, decision: Decision, classes: tuple[str, ...]) -> dict[str, list[str]]:
    """``findings``, and ``warnings`` about classes that are not recognised."""
    given = decision.labels(probs)
    scores = class_scores(probs, labels, given)
    present = [k for k in range(len(classes)) if scores.count[k]]
    named = sorted(present, key=lambda k: int(scores.count[k]))
    if len(named) > _FEW:
        named = sorted(present, key=lambda k: float(scores.recall[k]))[:3]
    found = [
        f"{int((scores.recall[k] * scores.count[k]).round())} of {int(scores.count[k])} “{classes[k]}” "
        f"({percent(float(scores.recall[k]))})"
        for k in named
    ]
    start = f"Least recognised of {len(present)} classes" if len(present) > _FEW else "It recognises"
    said = [f"{start}: {', '.join(found)}."]
    if (level := decision.threshold()) is not None:
        said[0] += f" It answers “{classes[level[0]]}” from a probability of {percent(level[1])} on."
    answered = given >= 0
    common = classes[int(scores.count.argmax())]
    of_answers = "" if bool(answered.all()) else " of its answers"
    balanced = percent(float(scores.recall.nanmean()))
    right = percent(float((given == labels)[answered].double().mean()))
    said.append(
        f"Balanced accuracy {balanced}, where a constant answer has {percent(1 / len(present))}. "
        f"Accuracy{of_answers} {right}, where always answering “{common}” has "
        f"{percent(majority_accuracy(probs, labels))}."
    )
    if not bool(answered.all()):
        said.append(f"It answers {int(answered.sum())} of {len(labels)} examples, and abstains from the others.")
    said.append(_ranking(scores, present, classes))
    if decision.thresholds:
        sets = decision.sets(probs)
        held = sets.gather(1, labels.unsqueeze(1)).double().mean()
        size = sets.sum(1).double().mean()
        said.append(
            f"Prediction sets hold the true class of {percent(float(held))}, and {size:.2f} classes on average."
        )
    return {"findings": said, "warnings": _warnings(scores, present, classes)}


def label_findings(
    scores: Sequence[Mapping[str, float]], targets: Tensor, answers: Tensor, names: Sequence[str], yes: str
) -> dict[str, list[str]]:
    """``findings`` and ``warnings`` of several labels, by :func:`dpivon.multilabel.label_scores`; the worst come first."""
    balanced, ranked = (torch.tensor([own[name] for own in scores]) for name in ("decided_balanced_accuracy", "auroc"))
    worst = f" The {_FEW} least recognised:" if len(names) > _FEW else ""
    said = [
        f"On average over {len(names)} labels: balanced accuracy {percent(float(balanced.nanmean()))}, where a constant answer "
        f"has 50 %; AUROC {float(ranked.nanmean()):.3f} (0.5 is chance).{worst}"
    ]
    poor = []
    for k in balanced.argsort().tolist()[:_FEW]:
        is_yes, name = targets[:, k] > 0.5, names[k]
        count, rest = int(is_yes.sum()), int((~is_yes).sum())
        if not count or not rest:
            said.append(f"“{name}” is the same in all test rows, so nothing can be said of how it is recognised.")
            continue
        hits, others = int((answers[is_yes, k] == 1).sum()), int((answers[~is_yes, k] == 0).sum())
        said.append(
            f"“{name}”: recognises {hits} of {count} “{yes}” ({percent(hits / count)}) and {others} of {rest} others "
            f"({percent(others / rest)}); AUROC {float(ranked[k]):.3f}."
        )
        if float(balanced[k]) <= _CONSTANT:
            remedy = f"declare what missing it costs, such as `--cost {name}=5`, or use `--prior count --cost balanced`"
            remedy = remedy if float(ranked[k]) > _USEFUL else "it takes more rows, a larger ε or other columns"
            poor.append(f"“{name}” is recognised hardly better than by a constant answer: {remedy}.")
    return {"findings": said, "warnings": poor}


def _ranking(scores: ClassScores, present: list[int], classes: tuple[str, ...]) -> str:
    mean = float(scores.auroc.nanmean())
    if math.isnan(mean):
        return f"All test examples are “{classes[present[0]]}”, so nothing can be said of how it tells classes apart."
    if len(classes) > 2:
        precision = float(scores.average_precision.nanmean())
        return f"AUROC {mean:.3f} and average precision {precision:.3f}, on average over the classes."
    rare = min(present, key=lambda k: int(scores.count[k]))
    share, name = int(scores.count[rare]) / int(scores.count.sum()), classes[rare]
    return (
        f"AUROC {mean:.3f} (0.5 is chance); average precision of “{name}” {float(scores.average_precision[rare]):.3f}, where "
        f"chance has {share:.3f}. Its probabilities of “{name}” are {percent(float(scores.mean_probability[rare]))} on "
        f"average, and {percent(share)} of the examples are."
    )


def _warnings(scores: ClassScores, present: list[int], classes: tuple[str, ...]) -> list[str]:
    never = [k for k in present if not scores.predicted[k]]
    chance = 1 / len(present)
    if not never and (len(present) < 2 or float(scores.recall.nanmean()) > chance + 0.1 * (1 - chance)):
        return []
    worst = never or [min(present, key=lambda k: float(scores.recall[k]))]
    names = ", ".join(f"“{classes[k]}”" for k in worst[:_FEW])
    first = classes[worst[0]]
    said = (
        f"The model never answers {names}. "
        if never
        else f"Hardly better than a constant answer: it misses most {names}. "
    )
    ranked = float(torch.nan_to_num(scores.auroc[worst]).max())
    if ranked > _USEFUL:
        return [
            f"{said}Its probabilities do tell “{first}” apart to some extent (AUROC {ranked:.2f}): declare what missing it "
            f"costs, such as `--cost {first}=5`, or decide at the classes’ shares, `--prior count --cost balanced`."
        ]
    return [f"{said}Its probabilities hardly tell it apart either: it takes more rows, a larger ε or other columns."]
