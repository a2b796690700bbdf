"""Predictions of a stack's runs, from a row of means and a row of standard deviations each.

Forward passes are made where the runs are, in fp32 whatever they were trained in; on a GPU convolutions are in TF32, torch's
default. Predictions stay there and are scored there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dpivon.data import MEAN, STD
from dpivon.metrics import batch_scores
from dpivon.predict import ClassPrediction, entropy, prediction_of
from dpivon.stacked import Network, Stack

AT_ONCE = {"cuda": 5000, "cpu": 64}  # images: enough to fill a GPU; what stays in a core's cache

# At the "mean" and, with a posterior, the "average" of draws: one per set.
Predictions = dict[str, list[ClassPrediction]]


def posterior_row(stack: Stack, i: int) -> tuple[Tensor, Tensor]:
    """Mean (or the average of iterates, where the run keeps one) and standard deviation of run i."""
    row = stack._row(i)
    return stack.average[row], stack.std[row]


@torch.no_grad()
def predict_row(
    network: Network, mean: Tensor, std: Tensor, sets: Sequence[Tensor], *, samples: int, seed: int
) -> Predictions:
    """Predict several sets of images, all with the same draws."""
    rows, model = draw_rows(mean, std, samples=samples, seed=seed), network.model(mean).eval()
    parts = [
        _sums(network, model, rows, normalised(part))
        for images in sets
        for part in images.split(AT_ONCE.get(mean.device.type, AT_ONCE["cpu"]))
    ]
    first, total, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
    sizes, draws = [len(images) for images in sets], len(rows) - 1
    out = {"mean": [prediction_of(probs, entropy(probs), 0) for probs in first.split(sizes)]}
    if draws:
        pairs = zip((total / draws).split(sizes), (entropies / draws).split(sizes), strict=True)
        out["average"] = [prediction_of(probs, expected, draws) for probs, expected in pairs]
    return out


def scores(found: Mapping[str, Sequence[ClassPrediction]], labels: Tensor) -> dict[str, float]:
    """accuracy, nll, ece and brier on the first set, and mc_… of the average; NaN where the run has diverged."""
    names = {"mean": "", "average": "mc_"}
    each = batch_scores(torch.stack([predictions[0].probs for predictions in found.values()]), labels)
    out = {f"{names[way]}{k}": v for way, scores in zip(found, each, strict=True) for k, v in scores.items()}
    return out | ({"mc_samples": found["average"][0].samples} if "average" in found else {})


def draw_rows(mean: Tensor, std: Tensor, *, samples: int, seed: int) -> list[Tensor]:
    """Rows of parameters: the mean, and ``samples`` draws if there is a posterior."""
    if not bool((std > 0).any()):
        return [mean]
    generator = torch.Generator(mean.device).manual_seed(seed)
    draws = (torch.randn(mean.shape, generator=generator, device=mean.device) for _ in range(samples))
    return [mean, *(mean + std * eps for eps in draws)]


def normalised(images: Tensor) -> Tensor:
    """Bytes as a network takes them; images that are normalised already stay as they are."""
    return images.float().div(255).sub(MEAN).div(STD) if images.dtype == torch.uint8 else images


def _sums(network: Network, model: nn.Module, rows: Sequence[Tensor], images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities at the first row, and sums over the others of probabilities and of their entropies."""
    if not images.is_cuda and images.dim() == 4:  # a CPU is about twice as fast so; a GPU's norms want channels first
        images = images.contiguous(memory_format=torch.channels_last)
    first, *others = (network.load(row, model)(images).softmax(-1) for row in rows)
    none = first.new_zeros(len(first), dtype=torch.float64)
    return first, sum(others, torch.zeros_like(first)), sum((entropy(probs) for probs in others), none)
