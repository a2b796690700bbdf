"""How good and how honest are predicted probabilities: accuracy, proper scores, calibration, abstention, single classes.

Every function takes ``probs`` [N, C], rows summing to 1, and integer ``labels`` [N], and returns a float
unless it says otherwise. "Confidence" is the largest probability of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpivon.errors import bad, check_number, check_whole
from dpivon.machine import one_thread

_BINS_FIX = "Pass how many bins to use, for instance 15"


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """The fraction of examples whose most probable class is the label."""
    return float(_top(*_checked(probs, labels))[1].mean())


def nll(probs: Tensor, labels: Tensor) -> float:
    """The negative log-likelihood −mean_i log p_i[y_i], in nats.

    A probability of zero is raised to the smallest normal number of ``probs``' dtype (1.2e-38 in float32,
    so no example costs more than 87.3 nats): one certain mistake makes the score bad, not infinite.
    """
    return float(_nll(*_checked(probs, labels), probs.dtype))


def brier(probs: Tensor, labels: Tensor) -> float:
    """The multiclass score of Brier, 1950: mean_i Σ_c (p_ic − 1[y_i = c])², from 0 to 2."""
    return float(_brier(*_checked(probs, labels)))


def ece(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error Σ_b (n_b/N)·|accuracy_b − confidence_b| over equal-width bins.

    Naeini et al., 2015; Guo et al., 2017 (arXiv:1706.04599). Summed in double: float32 sums, as torchmetrics has them, read
    .028 at four million equal confidences where 1e-4 is true.
    """
    p, y = _checked(probs, labels)
    return float(_ece(*_top(p, y), check_whole("bins", bins, _BINS_FIX, at_least=1)))


def adaptive_ece(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """:func:`ece` over equal-mass bins: sorted by confidence and cut so that sizes differ by at most one.

    Nguyen and O'Connor, 2015 (arXiv:1508.05154). With fewer examples than bins, each has its own. The sort
    is stable: examples of equal confidence that a cut divides are divided in the order they were given.
    """
    p, y = _checked(probs, labels)
    bins = check_whole("bins", bins, _BINS_FIX, at_least=1)
    confidence, correct = _top(p, y)
    order = torch.argsort(confidence, stable=True)
    gap = (correct - confidence)[order]
    return sum(abs(float(part.sum())) for part in gap.tensor_split(min(bins, len(gap)))) / len(gap)


def risk_coverage(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(coverage, risk), each [N]: k/N, and the error rate among the k most confident examples.

    El-Yaniv and Wiener, 2010. The sort is stable: among equal confidences the earlier example is answered
    first, so shuffle the examples if their order carries information.
    """
    risk = _risk(*_top(*_checked(probs, labels)))
    return torch.arange(1, len(risk) + 1, device=risk.device, dtype=risk.dtype) / len(risk), risk


def aurc(probs: Tensor, labels: Tensor) -> float:
    """Area under the risk–coverage curve: the mean over k of :func:`risk_coverage`'s risk.

    Geifman et al., 2019 (arXiv:1805.08206). Ties are ordered as they are there.
    """
    return float(risk_coverage(probs, labels)[1].mean())


def accuracy_at_coverage(probs: Tensor, labels: Tensor, coverage: float) -> float:
    """The accuracy on the ``coverage`` share of examples that are answered with most confidence, ⌈coverage·N⌉ of them."""
    fix = "Give the share of examples to answer"
    coverage = check_number("coverage", coverage, fix, above=0.0, at_most=1.0)
    risk = risk_coverage(probs, labels)[1]
    return 1.0 - float(risk[_rank(coverage, len(risk))])


def ood_auroc(in_scores: Tensor, out_scores: Tensor) -> float:
    """P(out > in) + ½·P(out = in): how well a score separates out-of-distribution inputs from in-distribution ones.

    A higher score, such as ``entropy`` or ``mutual_information``, has to mean more out of distribution.
    """
    return float(_auroc(*_checked_scores(in_scores, out_scores)))


def ood_fpr(in_scores: Tensor, out_scores: Tensor, accepted: float = 0.95) -> float:
    """The share of OOD inputs that are accepted where ``accepted`` of the in-distribution ones are: FPR@95.

    Liang et al., 2018 (arXiv:1706.02690). Scores are those of :func:`ood_auroc`. The threshold is the smallest score that at
    least so many in-distribution inputs do not exceed; an input at the threshold is accepted.
    """
    accepted = check_number("accepted", accepted, "Give the share of ordinary inputs to accept", above=0.0, at_most=1.0)
    return float(_fpr(*_checked_scores(in_scores, out_scores), accepted))


@one_thread()
@torch.no_grad()
def batch_scores(probs: Tensor, labels: Tensor) -> list[dict[str, float]]:
    """accuracy, nll, ece and brier of each of S sets of predictions, computed where they are.

    Args:
        probs: [S, N, C]. A set that is not finite scores NaN, and leaves the others as they are.
        labels: [S, N], or [N] for all sets.
    """
    lost = ~torch.isfinite(probs).flatten(1).all(1)
    p = probs.double().masked_fill(lost.view(-1, 1, 1), 1.0 / probs.shape[-1])
    y = labels.to(p.device).expand(p.shape[:2])
    confidence, correct = _top(p, y)
    found = {
        "accuracy": correct.mean(-1),
        "nll": _nll(p, y, probs.dtype),
        "ece": _ece(confidence, correct, 15),
        "brier": _brier(p, y),
    }
    values = torch.stack(list(found.values()), 1).masked_fill(lost.unsqueeze(1), math.nan).tolist()
    return [dict(zip(found, row, strict=True)) for row in values]


@dataclass(frozen=True, eq=False)
class ReliabilityBins:
    """A reliability diagram: bin b is [edges_b, edges_{b+1}), the last closed; empty bins hold NaN."""

    edges: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor


def reliability_bins(probs: Tensor, labels: Tensor, bins: int = 15) -> ReliabilityBins:
    """The equal-width bins behind :func:`ece`, with each bin's mean confidence and accuracy, for plots."""
    p, y = _checked(probs, labels)
    bins = check_whole("bins", bins, _BINS_FIX, at_least=1)
    confidence, correct = _top(p, y)
    edges, index = _bins(confidence, bins)
    count = torch.bincount(index, minlength=bins)
    summed = [torch.bincount(index, weights=w, minlength=bins) for w in (confidence, correct)]
    return ReliabilityBins(edges, count, summed[0] / count, summed[1] / count)


def wilson(share: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share of n, which stays sensible for a handful of examples and at 0 and 1."""
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return centre - half, centre + half


@dataclass(frozen=True, eq=False)
class ClassScores:
    """Scores of each class against all others, [C]; NaN where the examples cannot say.

    Attributes:
        count: examples of the class.
        predicted: examples that were given it.
        recall: the share of the class's examples that were given it (sensitivity).
        precision: the share of those that were given it which are of the class.
        auroc: P(p of an example of the class > p of another one) + half of ties.
        average_precision: Σ_n (R_n − R_{n−1}) P_n over the distinct probabilities, as scikit-learn defines it.
        mean_probability: the mean probability of the class, which calibration in the large holds against count/N.
    """

    count: Tensor
    predicted: Tensor
    recall: Tensor
    precision: Tensor
    auroc: Tensor
    average_precision: Tensor
    mean_probability: Tensor


def class_scores(probs: Tensor, labels: Tensor, predicted: Tensor | None = None) -> ClassScores:
    """Scores of each class; ``predicted`` are the decisions [N], −1 for none, by default the most probable classes."""
    p, y = _checked(probs, labels)
    given = p.argmax(-1) if predicted is None else predicted.to(y.device, torch.int64)
    one_hot, chosen = (t.unsqueeze(-1) == torch.arange(p.shape[1], device=y.device) for t in (y, given))
    count, answers, hits = one_hot.sum(0).double(), chosen.sum(0).double(), (one_hot & chosen).sum(0)
    curves = [
        (_auroc(s[~is_it], s[is_it]), _average_precision(s, is_it)) for s, is_it in zip(p.T, one_hot.T, strict=True)
    ]
    auroc, precision = (torch.stack(list(column)) for column in zip(*curves, strict=True))
    return ClassScores(count.long(), answers.long(), hits / count, hits / answers, auroc, precision, p.mean(0))


def balanced_accuracy(probs: Tensor, labels: Tensor, predicted: Tensor | None = None) -> float:
    """The mean recall of the classes that occur: 1/C for answers that do not look at the example."""
    return float(class_scores(probs, labels, predicted).recall.nanmean())


def majority_accuracy(probs: Tensor, labels: Tensor) -> float:
    """The accuracy of always answering the most frequent label: what :func:`accuracy` has to be held against."""
    _, y = _checked(probs, labels)
    return float(y.bincount().max()) / len(y)


def auroc(probs: Tensor, labels: Tensor) -> float:
    """Mean area under the ROC curve of each class against the others; NaN where only one class occurs."""
    return float(class_scores(probs, labels).auroc.nanmean())


def average_precision(probs: Tensor, labels: Tensor) -> float:
    """Mean average precision of each class that occurs against the others."""
    return float(class_scores(probs, labels).average_precision.nanmean())


def evaluate(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Every score by its name, each with its defaults; NaN where one is not defined."""
    scores = (accuracy, majority_accuracy, balanced_accuracy, auroc, average_precision)
    return {score.__name__: score(probs, labels) for score in (*scores, nll, brier, ece, adaptive_ece, aurc)}


# ---- the definitions, on double tensors with any leading dimensions: examples are the last of scores, p is [..., N, C]


def _top(p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence, and 1 where the most probable class is the label."""
    confidence, predicted = p.max(-1)
    return confidence, (predicted == y).to(p.dtype)


def _nll(p: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return -p.gather(-1, y.unsqueeze(-1)).squeeze(-1).clamp_min(torch.finfo(dtype).tiny).log().mean(-1)


def _brier(p: Tensor, y: Tensor) -> Tensor:
    at = y.unsqueeze(-1)
    return p.scatter(-1, at, p.gather(-1, at) - 1).square().sum(-1).mean(-1)


def _bins(confidence: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Edges of equal-width bins, and the bin of each example. In float32, as in torchmetrics."""
    edges = torch.linspace(0, 1, bins + 1, device=confidence.device)
    return edges, (torch.bucketize(confidence.float(), edges, right=True) - 1).clamp(0, bins - 1)


def _ece(confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    """Σ_b |Σ_i in b (correct_i − confidence_i)| / N. Not by bincount, whose order of sums varies on a GPU."""
    gap, index = correct - confidence, _bins(confidence, bins)[1]
    return torch.stack([(gap * (index == b)).sum(-1).abs() for b in range(bins)]).sum(0) / gap.shape[-1]


def _risk(confidence: Tensor, correct: Tensor) -> Tensor:
    order = confidence.argsort(dim=-1, descending=True, stable=True)
    k = torch.arange(1, correct.shape[-1] + 1, device=correct.device, dtype=correct.dtype)
    return (1 - correct.gather(-1, order)).cumsum(-1) / k


def _rank(share: float, n: int) -> int:
    """The place of the ⌈share·n⌉-th of n."""
    return math.ceil(share * n - 1e-9) - 1


def _auroc(inside: Tensor, outside: Tensor) -> Tensor:
    ordered = inside.sort(dim=-1).values
    below, not_above = (torch.searchsorted(ordered, outside, right=right).double() for right in (False, True))
    return (below + not_above).mean(-1) / (2 * ordered.shape[-1])


def _average_precision(scores: Tensor, is_it: Tensor) -> Tensor:
    """Of one class; NaN without examples of it. Equal scores are one step of the curve."""
    order = scores.argsort(descending=True, stable=True)
    hits, last = is_it[order].double().cumsum(0), scores[order].diff(append=scores.new_full((1,), -1.0)) != 0
    at = last.nonzero().squeeze(-1)
    recall = hits[at] / hits[-1]
    steps = recall.diff(prepend=recall.new_zeros(1))
    return (steps * hits[at] / (at + 1)).sum()


def _fpr(inside: Tensor, outside: Tensor, accepted: float) -> Tensor:
    threshold = inside.sort(dim=-1).values[..., _rank(accepted, inside.shape[-1]), None]
    return (outside <= threshold).double().mean(-1)


def _checked_scores(in_scores: Tensor, out_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Both as they are, on one device, or an error about the first problem."""
    for name, scores in (("in_scores", in_scores), ("out_scores", out_scores)):
        if scores.ndim != 1 or len(scores) == 0:
            fix = "Pass one score per example, and at least one"
            raise bad(f"{name}.shape", tuple(scores.shape), "is not a non-empty vector", fix)
        if bool(scores.isnan().any()):
            raise bad(name, "a tensor", "has entries that are NaN", "Remove the examples without a score")
    dtype = torch.promote_types(in_scores.dtype, out_scores.dtype)
    return in_scores.detach().to(dtype), out_scores.detach().to(in_scores.device, dtype)


def _checked(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """``probs`` in float64 and ``labels`` as int64 on one device, or an error about the first problem."""
    if probs.ndim != 2 or probs.shape[0] == 0 or probs.shape[1] < 2:
        fix = "Pass one row per example, at least one, and one column per class, at least two"
        raise bad("probs.shape", tuple(probs.shape), "is not [N, C]", fix)
    if not probs.is_floating_point():
        raise bad("probs.dtype", probs.dtype, "is not floating point", "Pass probabilities")
    if labels.shape != probs.shape[:1]:
        problem = f"must be {tuple(probs.shape[:1])}, one label for each row of probs"
        raise bad("labels.shape", tuple(labels.shape), problem, "Pass class indices, not one-hot rows")
    if labels.is_floating_point() or labels.is_complex():
        raise bad("labels.dtype", labels.dtype, "is not an integer type", "Convert the labels with .long()")
    p, y = probs.detach().double(), labels.detach().to(probs.device, torch.int64)
    if not bool(((p >= 0) & (p <= 1 + 1e-3)).all()):
        low, high = float(p.min()), float(p.max())
        value = "NaN" if math.isnan(low) else low if low < 0 else high
        raise bad("probs", value, "is not a probability", "Apply softmax to the logits first")
    sums = p.sum(-1)
    worst = float(sums[(sums - 1).abs().argmax()])
    if abs(worst - 1) > 1e-3:
        raise bad("probs", worst, "is the sum of a row and must be 1", "Apply softmax to the logits first")
    low_label, high_label = int(y.min()), int(y.max())
    if low_label < 0 or high_label >= p.shape[1]:
        value = low_label if low_label < 0 else high_label
        fix = "Remove the examples without a label, or check the model's number of classes"
        raise bad("labels", value, f"is not a class from 0 to {p.shape[1] - 1}", fix)
    return p, y
