"""Predictions of a stack's runs, from a row of means and a row of standard deviations each.

Forward passes are made where the runs are, in fp32 whatever they were trained in; on a GPU convolutions are in TF32, torch's
default. Predictions stay there and are scored there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dpivon.data import MEAN, STD
from dpivon.metrics import batch_scores
from dpivon.predict import ClassPrediction, entropy, prediction_of
from dpivon.stacked import Network, Stack
from dpivon.study.run.passes import EagerPasses, Passes

# At the "mean" and, with a posterior, the "average" of draws: one per set.
Predictions = dict[str, list[ClassPrediction]]


def posterior_row(stack: Stack, i: int) -> tuple[Tensor, Tensor]:
    """Mean (or the average of iterates, where the run keeps one) and standard deviation of run i."""
    row = stack._row(i)
    return stack.average[row], stack.std[row]


@torch.no_grad()
def predict_row(
    network: Network,
    mean: Tensor,
    std: Tensor,
    sets: Sequence[Tensor],
    *,
    samples: int,
    seed: int,
    passes: Passes | None = None,
) -> Predictions:
    """Predict several sets of images, all with the same draws. ``passes`` makes the forward passes; by default eagerly."""
    rows, way = draw_rows(mean, std, samples=samples, seed=seed), passes or EagerPasses(network, mean.device)
    parts = [_sums(way, rows, images) for images in _blocks(sets, way)]
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


def _blocks(sets: Sequence[Tensor], way: Passes) -> Iterator[Tensor]:
    """Normalised images that go through the network together: of one set, or of several if the way permits it."""
    joined = [torch.cat([normalised(images) for images in sets])] if way.joins else sets
    return (normalised(part) for images in joined for part in images.split(way.at_once))


def _sums(way: Passes, rows: Sequence[Tensor], images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities at the first row, and sums over the others of probabilities and of their entropies."""
    first, *others = (logits.softmax(-1) for logits in way.logits(rows, images))
    none = first.new_zeros(len(first), dtype=torch.float64)
    return first, sum(others, torch.zeros_like(first)), sum((entropy(probs) for probs in others), none)
