"""What test examples say about a classifier, in sentences for a reader who must act on its answers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpivon.decisions import Decision
from dpivon.metrics import ClassScores, class_scores, majority_accuracy

_FEW = 6  # classes that are all named
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
