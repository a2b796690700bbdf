"""Scores of a stack's runs on the device: for the mean, and averaged over posterior samples."""

from __future__ import annotations

import torch
from torch import Tensor

from dpivon import metrics
from dpivon.stacked import Network, Stack
from dpivon.study.table import SCORES

BINS = 15
_CHUNK = 5000  # pictures a forward pass


@torch.no_grad()
def scores(stack: Stack, i: int, images: Tensor, labels: Tensor, *, samples: int, seed: int) -> dict[str, float]:
    """accuracy, nll, ece and brier of run i, and mc_… where it has a posterior. NaN where the run has diverged."""
    row = stack._row(i)
    mean, std = stack.average[row], stack.std[row]  # the mean itself unless the run keeps an average
    return row_scores(stack.network, mean, std, images, labels, samples=samples, seed=seed)


@torch.no_grad()
def row_scores(
    network: Network, mean: Tensor, std: Tensor, images: Tensor, labels: Tensor, *, samples: int, seed: int
) -> dict[str, float]:
    """The same of a row of means and a row of standard deviations."""
    out = _scores(probabilities(network, mean[None], images), labels)
    if bool((std > 0).any()):
        generator = torch.Generator(mean.device).manual_seed(seed)
        total = torch.zeros(len(images), 1, device=mean.device)
        for _ in range(samples):
            eps = torch.randn(mean.shape, generator=generator, device=mean.device)
            total = total + probabilities(network, (mean + std * eps)[None], images)
        out |= {f"mc_{k}": v for k, v in _scores(total / samples, labels).items()} | {"mc_samples": samples}
    return out


@torch.no_grad()
def probabilities(network: Network, rows: Tensor, images: Tensor) -> Tensor:
    """softmax averaged over rows of parameters, [N, classes]. Images are [N, channels, H, W]."""
    total: Tensor | None = None
    for row in rows:
        model = network.model(row).eval()
        logits = torch.cat([model(part) for part in images.split(_CHUNK)])
        total = logits.softmax(-1) if total is None else total + logits.softmax(-1)
    assert total is not None
    return total / len(rows)


def _scores(probs: Tensor, labels: Tensor) -> dict[str, float]:
    if not bool(torch.isfinite(probs).all()):
        return dict.fromkeys(SCORES, float("nan"))
    return {
        "accuracy": float((probs.argmax(-1) == labels).double().mean()),  # torchmetrics' is not on a bare machine
        "nll": metrics.nll(probs, labels),
        "ece": metrics.ece(probs, labels, BINS),
        "brier": metrics.brier(probs, labels),
    }
