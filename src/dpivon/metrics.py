"""How good and how honest are predicted probabilities: accuracy, proper scores, calibration, abstention.

Every function takes ``probs`` [N, C], rows summing to 1, and integer ``labels`` [N], and returns a float
unless it says otherwise. "Confidence" is the largest probability of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpivon.errors import bad, check_number, check_whole

_BINS_FIX = "Pass how many bins to use, for instance 15"


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """The fraction of examples whose most probable class is the label."""
    from torchmetrics.functional.classification import multiclass_accuracy

    p, y = _checked(probs, labels)
    return float(multiclass_accuracy(p, y, num_classes=p.shape[1], average="micro"))


def nll(probs: Tensor, labels: Tensor) -> float:
    """The negative log-likelihood −mean_i log p_i[y_i], in nats.

    A probability of zero is raised to the smallest normal number of ``probs``' dtype (1.2e-38 in float32,
    so no example costs more than 87.3 nats): one certain mistake makes the score bad, not infinite.
    """
    p, y = _checked(probs, labels)
    tiny = torch.finfo(probs.dtype).tiny
    return float(-p.gather(1, y[:, None]).clamp_min(tiny).log().mean())


def brier(probs: Tensor, labels: Tensor) -> float:
    """The multiclass score of Brier, 1950: mean_i Σ_c (p_ic − 1[y_i = c])², from 0 to 2."""
    p, y = _checked(probs, labels)
    target = torch.nn.functional.one_hot(y, p.shape[1]).to(p.dtype)
    return float((p - target).square().sum(-1).mean())


def ece(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error Σ_b (n_b/N)·|accuracy_b − confidence_b| over equal-width bins.

    Naeini et al., 2015; Guo et al., 2017 (arXiv:1706.04599). Our own, though torchmetrics has it and the tests hold
    it to that: torchmetrics sums in float32, which at four million equal confidences reads .028 where 1e-4 is true.
    """
    table = reliability_bins(probs, labels, bins)
    gaps = torch.nan_to_num((table.accuracy - table.confidence).abs() * table.count)
    return float(gaps.sum() / table.count.sum())


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
    p, y = _checked(probs, labels)
    confidence, correct = _top(p, y)
    order = torch.argsort(confidence, descending=True, stable=True)
    k = torch.arange(1, len(order) + 1, device=p.device, dtype=p.dtype)
    return k / len(order), (1 - correct[order]).cumsum(0) / k


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
    return 1.0 - float(risk[math.ceil(coverage * len(risk) - 1e-9) - 1])


def ood_auroc(in_scores: Tensor, out_scores: Tensor) -> float:
    """P(out > in) + ½·P(out = in): how well a score tells out-of-distribution inputs from ordinary ones.

    A higher score, such as ``entropy`` or ``mutual_information``, has to mean more out of distribution.
    """
    ordinary, other = _checked_scores(in_scores, out_scores)
    ordered = ordinary.sort().values
    below, not_above = (torch.searchsorted(ordered, other, right=right).double() for right in (False, True))
    return float((below + not_above).mean() / (2 * len(ordered)))


def ood_fpr(in_scores: Tensor, out_scores: Tensor, accepted: float = 0.95) -> float:
    """The share of out-of-distribution inputs that pass for ordinary where ``accepted`` of the ordinary ones do: FPR95.

    Liang et al., 2018 (arXiv:1706.02690). Scores are those of :func:`ood_auroc`. The threshold is the smallest score that at
    least so many ordinary inputs do not exceed; who is at the threshold passes.
    """
    accepted = check_number("accepted", accepted, "Give the share of ordinary inputs to accept", above=0.0, at_most=1.0)
    ordinary, other = _checked_scores(in_scores, out_scores)
    threshold = ordinary.sort().values[math.ceil(accepted * len(ordinary) - 1e-9) - 1]
    return float((other <= threshold).double().mean())


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
    # Edges and comparison in float32, as in torchmetrics: the plot has to show what ece() reports.
    edges = torch.linspace(0, 1, bins + 1, device=p.device)
    index = (torch.bucketize(confidence.float(), edges, right=True) - 1).clamp(0, bins - 1)
    count = torch.bincount(index, minlength=bins)
    summed = [torch.bincount(index, weights=w, minlength=bins) for w in (confidence, correct)]
    return ReliabilityBins(edges, count, summed[0] / count, summed[1] / count)


def wilson(share: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share of n, which stays sensible for a handful of examples and at 0 and 1."""
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return centre - half, centre + half


def evaluate(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, nll, brier, ece, adaptive_ece and aurc by name, each with its defaults."""
    scores = (accuracy, nll, brier, ece, adaptive_ece, aurc)
    return {score.__name__: score(probs, labels) for score in scores}


def _top(p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence, and 1 where the most probable class is the label."""
    confidence, predicted = p.max(-1)
    return confidence, (predicted == y).to(p.dtype)


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
