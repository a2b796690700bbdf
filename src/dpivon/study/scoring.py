"""Scores of many sets at once, where their predictions are: few operations, and one look at the numbers that come out.

They are those of :mod:`dpivon.metrics`, which takes one set at a time and reads many values off it; the tests hold them to it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpivon.study.table import COVERAGES
from dpivon.threads import one_thread

BINS = 15
ACCEPTED = 0.95


@one_thread()
@torch.no_grad()
def scored(probs: Tensor, labels: Tensor, *, selective: bool = False) -> list[dict[str, float]]:
    """accuracy, nll, ece and brier of each of S sets, [S, N, C], with labels [S, N] or [N]; if ``selective`` also aurc, and the
    accuracy on the 10, 20, … 90 % that are answered with most confidence. NaN of a set that is not finite."""
    lost = ~torch.isfinite(probs).flatten(1).all(1)
    p = probs.double().masked_fill(lost.view(-1, 1, 1), 1.0 / probs.shape[-1])
    y = labels.to(p.device).expand(p.shape[:2]).unsqueeze(-1)
    confidence, top = p.max(-1, keepdim=True)
    own, correct = p.gather(-1, y), (top == y).double()
    found = {
        "accuracy": correct.mean((1, 2)),
        "nll": -own.clamp_min(torch.finfo(probs.dtype).tiny).log().mean((1, 2)),
        "ece": _ece(confidence, correct),
        "brier": p.scatter(-1, y, own - 1).square().sum(-1).mean(-1),
    }
    if selective:
        found |= _withheld(confidence.squeeze(-1), correct.squeeze(-1))
    values = torch.stack(list(found.values()), 1).masked_fill(lost.unsqueeze(1), math.nan)
    return [dict(zip(found, row, strict=True)) for row in values.tolist()]


def _ece(confidence: Tensor, correct: Tensor) -> Tensor:
    """Σ_b |Σ_i in b (correct_i − confidence_i)| / N, in an order that a GPU does not change from time to time."""
    edges = torch.linspace(0, 1, BINS + 1, device=confidence.device)
    bins = (torch.bucketize(confidence.float(), edges, right=True) - 1).clamp(0, BINS - 1)
    member = bins == torch.arange(BINS, device=bins.device)
    return ((correct - confidence) * member).sum(1).abs().sum(1) / confidence.shape[1]


def _withheld(confidence: Tensor, correct: Tensor) -> dict[str, Tensor]:
    """The sort is stable: among equal confidences the earlier picture is answered first."""
    n = correct.shape[1]
    order = confidence.argsort(dim=1, descending=True, stable=True)
    risk = (1 - correct.gather(1, order)).cumsum(1) / torch.arange(1, n + 1, device=correct.device)
    answered = {c: -(-c * n // 100) for c in COVERAGES}  # rounded up
    return {"aurc": risk.mean(1)} | {f"accuracy_at_{c}": 1 - risk[:, k - 1] for c, k in answered.items()}


@one_thread()
@torch.no_grad()
def told_apart(ordinary: Tensor, other: Tensor) -> list[tuple[float, float]]:
    """AUROC and FPR95 of each of B scores, [B, N] of ordinary pictures and [B, M] of others; NaN of one that is not finite."""
    lost = ~(torch.isfinite(ordinary).all(1) & torch.isfinite(other).all(1))
    ordinary, other = (s.double().masked_fill(lost.unsqueeze(1), 0.0) for s in (ordinary, other))
    ordered, n = ordinary.sort(dim=1).values, ordinary.shape[1]
    below, not_above = (torch.searchsorted(ordered, other, right=right).double() for right in (False, True))
    threshold = ordered[:, math.ceil(ACCEPTED * n - 1e-9) - 1].unsqueeze(1)
    found = [(below + not_above).mean(1) / (2 * n), (other <= threshold).double().mean(1)]
    values = torch.stack(found, 1).masked_fill(lost.unsqueeze(1), math.nan)
    return [(auroc, fpr) for auroc, fpr in values.tolist()]
