"""Accuracy, NLL and ECE of a network: raw, at its best temperature, and averaged over shifted and mirrored images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpivon.metrics import accuracy, ece, nll
from dpivon.temperature import temper
from experiments.leaderboard.priors.data import Split

#: The image itself and four shifts by two pixels, each mirrored too: ten views at prediction time.
SHIFTS = ((0, 0), (2, 0), (-2, 0), (0, 2), (0, -2))
TEMPERATURES = torch.linspace(-1.0, 1.5, 126).exp().tolist()


@torch.no_grad()
def probabilities(network: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([network(x).float() for x in images.split(2000)]).softmax(1)


@torch.no_grad()
def averaged(network: nn.Module, images: Tensor) -> Tensor:
    """Probabilities averaged over the views: post-processing of the network, so it costs no privacy."""
    side = images.shape[-1]
    padded = F.pad(images, (2, 2, 2, 2), mode="reflect")
    seen = [padded[..., 2 + y : 2 + y + side, 2 + x : 2 + x + side] for y, x in SHIFTS]
    each = [probabilities(network, view) for shifted in seen for view in (shifted, shifted.flip(-1))]
    return torch.stack(each).mean(0)


def best_temperature(probs: Tensor, labels: Tensor) -> float:
    """The temperature of the least NLL, to two percent."""
    log_probs = probs.double().clamp_min(1e-38).log()
    losses = [float(F.cross_entropy(log_probs / t, labels)) for t in TEMPERATURES]
    return float(TEMPERATURES[losses.index(min(losses))])


def scores(network: nn.Module, split: Split) -> dict[str, float]:
    """Every column of the table that a trained network decides."""
    network = network.eval()
    probs, y = probabilities(network, split.score_images), split.score_labels
    t = best_temperature(probabilities(network, split.fit_images), split.fit_labels)
    tempered = temper(probs, t)
    found = {"accuracy": accuracy(probs, y), "nll": nll(probs, y), "ece": ece(probs, y), "temperature": t}
    found |= {"tempered_nll": nll(tempered, y), "tempered_ece": ece(tempered, y)}
    t = best_temperature(averaged(network, split.fit_images), split.fit_labels)
    shown = temper(averaged(network, split.score_images), t)
    found |= {"tta_accuracy": accuracy(shown, y), "tta_nll": nll(shown, y), "tta_ece": ece(shown, y)}
    return {name: round(value, 5) for name, value in found.items()}
