"""Scores of a stack's runs: for the mean, and averaged over posterior samples.

Forward passes are made where the runs are, in fp32 whatever they were trained in; on a GPU convolutions are in TF32, which is
torch's way unless it is told otherwise. What they say stays there and is scored there (:func:`dpivon.metrics.batch_scores`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpivon.data import MEAN, STD
from dpivon.metrics import batch_scores
from dpivon.stacked import Network, Stack
from dpivon.study.passes.eager import EagerPasses
from dpivon.study.passes.way import Passes


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
    return scores_of(predicted(network, mean, std, [images], samples=samples, seed=seed), labels, samples)


def scores_of(found: Mapping[str, Sequence[Predicted]], labels: Tensor, samples: int) -> dict[str, float]:
    """The same of what was said, the first set being that of the labels."""
    names = {"mean": "", "average": "mc_"}
    each = batch_scores(torch.stack([answers[0].probs for answers in found.values()]), labels)
    out = {f"{names[way]}{k}": v for way, scores in zip(found, each, strict=True) for k, v in scores.items()}
    return out | ({"mc_samples": samples} if "average" in found else {})


@torch.no_grad()
def predicted(
    network: Network,
    mean: Tensor,
    std: Tensor,
    sets: Sequence[Tensor],
    *,
    samples: int,
    seed: int,
    passes: Passes | None = None,
) -> dict[str, list[Predicted]]:
    """What a run says of several sets of pictures: at its "mean", and as the "average" of draws if it has a posterior.

    All sets see the same draws. ``passes`` is a way to make them (:mod:`dpivon.study.passes`); by default the eager one.
    """
    rows, way = drawn(mean, std, samples=samples, seed=seed), passes or EagerPasses(network, mean.device)
    parts = [_said(way, rows, pictures) for pictures in _blocks(sets, way)]
    first, total, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
    sizes, draws = [len(pictures) for pictures in sets], len(rows) - 1
    out = {"mean": [Predicted(probs) for probs in first.split(sizes)]}
    if draws:
        probs = total / draws
        information = (entropy(probs) - entropies / draws).clamp_min(0)
        pairs = zip(probs.split(sizes), information.split(sizes), strict=True)
        out["average"] = [Predicted(p, i) for p, i in pairs]
    return out


def drawn(mean: Tensor, std: Tensor, *, samples: int, seed: int) -> list[Tensor]:
    """Rows of parameters: the mean, and so many draws if there is a posterior."""
    if not bool((std > 0).any()):
        return [mean]
    generator = torch.Generator(mean.device).manual_seed(seed)
    draws = (torch.randn(mean.shape, generator=generator, device=mean.device) for _ in range(samples))
    return [mean, *(mean + std * eps for eps in draws)]


def _blocks(sets: Sequence[Tensor], way: Passes) -> Iterator[Tensor]:
    """Pictures that are looked at together, as a network sees them: of one set, or of whichever if the way takes that."""
    joined = [torch.cat([seen(pictures) for pictures in sets])] if way.joins else sets
    return (seen(part) for pictures in joined for part in pictures.split(way.at_once))


def _said(way: Passes, rows: Sequence[Tensor], pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities at the first row, and sums over the others of probabilities and of their entropies."""
    first, *others = (logits.softmax(-1) for logits in way.logits(rows, pictures))
    none = first.new_zeros(len(first), dtype=torch.float64)
    return first, sum(others, torch.zeros_like(first)), sum((entropy(probs) for probs in others), none)


def entropy(probs: Tensor) -> Tensor:
    """[N], in nats and float64: the mutual information is a small difference of two."""
    return torch.special.entr(probs.double()).sum(-1)


def seen(pictures: Tensor) -> Tensor:
    """As a network sees them: bytes are normalised, what is normalised already stays."""
    return pictures.float().div(255).sub(MEAN).div(STD) if pictures.dtype == torch.uint8 else pictures


def label_scores(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """accuracy, nll, ece and brier; NaN of what is not finite."""
    return batch_scores(probs.unsqueeze(0), labels)[0]
