"""Scores of a stack's runs on the device: for the mean, and averaged over posterior samples.

In fp32, whatever the runs were trained in; on a GPU torch takes convolutions in TF32 unless it is told otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpivon import metrics
from dpivon.data import MEAN, STD
from dpivon.stacked import Network, Stack
from dpivon.study.table import SCORES

BINS = 15
_CHUNK = {"cpu": 64}  # pictures a forward pass: what stays in a core's cache
_LARGE = 5000  # on a GPU: enough to fill it, and launches cost nothing beside it


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

    All sets see the same draws. There is one model, into which every draw is put; pictures are normalised once for all draws.
    """
    rows = [mean]
    if bool((std > 0).any()):
        generator = torch.Generator(mean.device).manual_seed(seed)
        draws = (torch.randn(mean.shape, generator=generator, device=mean.device) for _ in range(samples))
        rows += [mean + std * eps for eps in draws]
    model = network.model(mean).eval()
    said = [_Said(network, model, rows, images) for images in sets]
    out = {"mean": [Predicted(s.mean) for s in said]}
    if len(rows) > 1:
        out["average"] = [s.average() for s in said]
    return out


class _Said:
    """What a model says of a set of pictures with each of several rows of parameters: the first, and the sum of the others."""

    def __init__(self, network: Network, model: nn.Module, rows: Sequence[Tensor], images: Tensor) -> None:
        self.draws = len(rows) - 1
        means, totals, entropies = [], [], []
        for part in images.split(_CHUNK.get(images.device.type, _LARGE)):
            pictures = _laid_out(seen(part))
            first, *others = (network.load(row, model)(pictures).softmax(-1) for row in rows)
            means.append(first)
            totals.append(sum(others, torch.zeros_like(first)))
            entropies.append(
                sum((entropy(probs) for probs in others), first.new_zeros(len(first), dtype=torch.float64))
            )
        self.mean, self.total, self.entropy = (torch.cat(parts) for parts in (means, totals, entropies))

    def average(self) -> Predicted:
        probs = self.total / self.draws
        return Predicted(probs, (entropy(probs) - self.entropy / self.draws).clamp_min(0))


def entropy(probs: Tensor) -> Tensor:
    """[N], in nats and float64: the mutual information is a small difference of two."""
    return torch.special.entr(probs.double()).sum(-1)


def seen(pictures: Tensor) -> Tensor:
    """As a network sees them: bytes are normalised, what is normalised already stays."""
    return pictures.float().div(255).sub(MEAN).div(STD) if pictures.dtype == torch.uint8 else pictures


def _laid_out(pictures: Tensor) -> Tensor:
    """Channels last on a CPU, whose convolutions and norms are about twice as fast so; a GPU's norms want them first."""
    if pictures.is_cuda or pictures.dim() != 4:
        return pictures
    return pictures.contiguous(memory_format=torch.channels_last)


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
