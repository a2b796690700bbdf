"""Logits that are trained first on the feature maps, and then written into hidden units without changing a prediction.

A prior's maps tell more of the classes than its 128 hidden units do (:mod:`probe`). So the first phase trains a linear layer on
the maps, and relu(z) − relu(−z) = z makes a network of the same shape of it: every logit z is two hidden units, and the last
layer subtracts them. The other hidden units stay as the prior has them, with no say in the logits yet. All weights are trained
from there. The last step looks at released weights alone.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from dpivon.data import MEAN, STD
from dpivon.models import PaperCNN
from dpivon.priors.processes import images
from experiments.leaderboard.priors.flat import IMAGES
from experiments.leaderboard.priors.scores import SHIFTS

#: DP-SGD's rate in the first phase, whose steps are of all images.
RATE = 8.0


@torch.no_grad()
def maps(network: PaperCNN, pixels: Tensor, views: bool = False) -> Tensor:
    """What the hidden layer sees, [N, 2048]; with ``views`` the mean over ten shifted and mirrored copies of an image."""
    body, side, found = copy.deepcopy(network.features).to(pixels.device), pixels.shape[-1], []
    for x in pixels.split(2500):
        if not views:
            found.append(body(x).flatten(1))
            continue
        padded = F.pad(x, (2, 2, 2, 2), mode="reflect")
        each = [padded[..., 2 + i : 2 + i + side, 2 + j : 2 + j + side] for i, j in SHIFTS]
        found.append(torch.stack([body(v).flatten(1) for one in each for v in (one, one.flip(-1))]).mean(0))
    return torch.cat(found)


def made_up(process: str, device: torch.device, count: int = IMAGES) -> Tensor:
    """Images of a process, normalised as photographs are."""
    g = Generator(device).manual_seed(0)
    parts = [images(process, min(512, count - i), g, 32) for i in range(0, count, 512)]
    return (torch.cat(parts).float() / 255 - MEAN) / STD


@torch.no_grad()
def fold(network: PaperCNN, weight: Tensor, bias: Tensor, size: float, copies: int = 1) -> None:
    """Write logits of maps into ``network``, in place: the same function of an image, up to rounding.

    Args:
        network: its first 20 · ``copies`` hidden units become the logits and their negatives.
        weight: of the logits, on maps as they are.
        bias: of the logits.
        size: root mean square of the weights into these units, in those of an initialisation.
        copies: of every logit, which share its weight out.
    """
    hidden, last = network.head.hidden, network.head.logits
    weight, bias = weight.to(hidden.weight.device), bias.to(hidden.weight.device)
    scale = size / (3 * hidden.in_features) ** 0.5 / float(weight.square().mean().sqrt().clamp_min(1e-12))
    classes = len(bias)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    for i in range(2 * copies):
        sign, units = 1.0 - 2.0 * (i % 2), slice(i * classes, (i + 1) * classes)
        hidden.weight[units] = sign * scale * weight
        hidden.bias[units] = sign * scale * bias
        last.weight[:, units] = sign / (scale * copies) * torch.eye(classes)
