"""Scores of a stack's runs on the device: for the mean, and averaged over posterior samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpivon import metrics
from dpivon.stacked import Network, Stack
from dpivon.stacked.temperature import calibrate_stack
from dpivon.study.datasets import StudyData
from dpivon.study.table import SCORES
from dpivon.temperature import temper

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
        averaged = predictive(network, mean, std, images, samples=samples, seed=seed)
        out |= {f"mc_{k}": v for k, v in _scores(averaged, labels).items()} | {"mc_samples": samples}
    return out


@torch.no_grad()
def predictive(network: Network, mean: Tensor, std: Tensor, images: Tensor, *, samples: int, seed: int) -> Tensor:
    """What a run predicts with: averaged over draws of its posterior, or by its mean where it has no width."""
    if not bool((std > 0).any()):
        return probabilities(network, mean[None], images)
    generator = torch.Generator(mean.device).manual_seed(seed)
    total = torch.zeros(len(images), 1, device=mean.device)
    for _ in range(samples):
        eps = torch.randn(mean.shape, generator=generator, device=mean.device)
        total = total + probabilities(network, (mean + std * eps)[None], images)
    return total / samples


@torch.no_grad()
def tempered_scores(
    stack: Stack, data: StudyData, *, noise_multiplier: float, samples: int, seeds: Sequence[int]
) -> list[dict[str, float]]:
    """The temperature of every run, chosen on the training data and charged, and its scores after it."""
    rows = [stack._row(i) for i in range(len(stack.runs))]

    def predictions(i: int, images: Tensor) -> Tensor:
        mean, std = stack.average[rows[i]], stack.std[rows[i]]
        found = predictive(stack.network, mean, std, images, samples=samples, seed=seeds[i])
        return found if bool(torch.isfinite(found).all()) else torch.full_like(found, 1.0 / found.shape[1])

    device = torch.device("cpu")  # of the noise: a study's seeds are public, and the same on every machine
    generators = [torch.Generator(device).manual_seed(stack.runs[row].seed) for row in rows]
    probs = [predictions(i, data.images).to(device) for i in range(len(rows))]
    labels = data.labels.to(device)
    found = calibrate_stack(stack, probs, labels, noise_multiplier=noise_multiplier, generators=generators)
    out = []
    for i, temperature in enumerate(found):
        after = _scores(temper(predictions(i, data.eval_images), temperature), data.eval_labels)
        out.append({"temperature": temperature} | {f"tempered_{key}": value for key, value in after.items()})
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
