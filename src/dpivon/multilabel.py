"""Several labels, each yes or no: independent Bernoulli likelihoods, one loss per example, and scores of their predictions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dpivon.metrics import class_scores, evaluate


def multilabel_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """−Σ_k log p(y_k | x) of logits [B, K] and targets [B, K] of 0 and 1, [B]: an example is clipped once, with all labels."""
    return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none").sum(1)


def label_scores(probs: Tensor, targets: Tensor, answers: Tensor | None = None) -> list[dict[str, float]]:
    """The scores of each label, of ``probs`` [N, K, 2], ``targets`` [N, K] and ``answers`` [N, K], by default the likelier.

    Those of :func:`dpivon.metrics.evaluate`, but average precision is that of yes; and of the answers sensitivity, specificity
    and decided_balanced_accuracy, their mean; ``share`` is that of yes. NaN where one is not defined.
    """
    answers = probs.argmax(-1) if answers is None else answers
    found = []
    for p, y, given in zip(probs.unbind(1), targets.long().unbind(1), answers.unbind(1), strict=True):
        own = class_scores(p, y, given)
        no, yes = own.recall.tolist()
        more = {"sensitivity": yes, "specificity": no, "decided_balanced_accuracy": float(own.recall.nanmean())}
        more["share"] = float(y.double().mean())
        found.append(evaluate(p, y) | more | {"average_precision": float(own.average_precision[1])})
    return found


def macro(scores: list[dict[str, float]]) -> dict[str, float]:
    """The mean over the labels of every score, without labels where it is not defined."""
    return {
        name: float(torch.tensor([own[name] for own in scores], dtype=torch.float64).nanmean()) for name in scores[0]
    }
