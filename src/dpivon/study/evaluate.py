"""Scores of a stack's runs on the device: for the mean, and averaged over posterior samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpivon import metrics
from dpivon.data import MEAN, STD
from dpivon.stacked import Network, Stack
from dpivon.study.table import SCORES

BINS = 15
_CHUNK = 5000  # pictures a forward pass


@dataclass(frozen=True, eq=False)
class Predicted:
    """Probabilities [N, classes] and, where several draws of θ were averaged, the mutual information [N] of label and θ."""

    probs: Tensor
    information: Tensor | None = None


@torch.no_grad()
def scores(stack: Stack, i: int, images: Tensor, labels: Tensor, *, samples: int, seed: int) -> dict[str, float]:
    """accuracy, nll, ece and brier of run i, and mc_… where it has a posterior. NaN where the run has diverged."""
    return row_scores(stack.network, *gaussian(stack, i), images, labels, samples=samples, seed=seed)


def gaussian(stack: Stack, i: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of run i: the mean itself, unless the run keeps an average of its iterates."""
    row = stack._row(i)
    return stack.average[row], stack.std[row]


@torch.no_grad()
def row_scores(
    network: Network, mean: Tensor, std: Tensor, images: Tensor, labels: Tensor, *, samples: int, seed: int
) -> dict[str, float]:
    """The same of a row of means and a row of standard deviations."""
    found = predicted(network, mean, std, [images], samples=samples, seed=seed)
    out = label_scores(found["mean"][0].probs, labels)
    if "average" in found:
        averaged = label_scores(found["average"][0].probs, labels)
        out |= {f"mc_{k}": v for k, v in averaged.items()} | {"mc_samples": samples}
    return out


@torch.no_grad()
def predicted(
    network: Network, mean: Tensor, std: Tensor, sets: Sequence[Tensor], *, samples: int, seed: int
) -> dict[str, list[Predicted]]:
    """What a run says of several sets of pictures: at its "mean", and as the "average" of draws if it has a posterior.

    All sets see the same draws, and every draw is made into a model once.
    """
    out = {"mean": [Predicted(p) for p in _each(network, mean, sets)]}
    if bool((std > 0).any()):
        generator = torch.Generator(mean.device).manual_seed(seed)
        totals = [torch.zeros(len(images), 1, device=mean.device) for images in sets]
        entropies = [torch.zeros(len(images), dtype=torch.float64, device=mean.device) for images in sets]
        for _ in range(samples):
            eps = torch.randn(mean.shape, generator=generator, device=mean.device)
            for j, probs in enumerate(_each(network, mean + std * eps, sets)):
                totals[j] = totals[j] + probs
                entropies[j] += entropy(probs)
        averages = [total / samples for total in totals]
        out["average"] = [
            Predicted(p, (entropy(p) - e / samples).clamp_min(0)) for p, e in zip(averages, entropies, strict=True)
        ]
    return out


def entropy(probs: Tensor) -> Tensor:
    """[N], in nats and float64: the mutual information is a small difference of two."""
    return torch.special.entr(probs.double()).sum(-1)


def _each(network: Network, row: Tensor, sets: Sequence[Tensor]) -> list[Tensor]:
    """softmax of one row of parameters on every set, in pieces."""
    model = network.model(row).eval()
    return [torch.cat([model(seen(part)) for part in images.split(_CHUNK)]).softmax(-1) for images in sets]


def seen(pictures: Tensor) -> Tensor:
    """As a network sees them: bytes are normalised, what is normalised already stays."""
    return pictures.float().div(255).sub(MEAN).div(STD) if pictures.dtype == torch.uint8 else pictures


def label_scores(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """accuracy, nll, ece and brier; NaN of what is not finite."""
    if not bool(torch.isfinite(probs).all()):
        return dict.fromkeys(SCORES, float("nan"))
    return {
        "accuracy": float((probs.argmax(-1) == labels).double().mean()),  # torchmetrics' is not on a bare machine
        "nll": metrics.nll(probs, labels),
        "ece": metrics.ece(probs, labels, BINS),
        "brier": metrics.brier(probs, labels),
    }
