"""First weights: a prior as it was learned, in another geometry, or none."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from dpivon.models import PaperCNN
from experiments.leaderboard.priors.learn import load_prior
from experiments.leaderboard.priors.plans import SCRATCH, Cell


class Starts:
    """The networks that cells start from; ``priors`` are files by name."""

    def __init__(self, priors: Mapping[str, Path]) -> None:
        self.priors = dict(priors)

    def learned(self, cell: Cell) -> PaperCNN:
        """As it was learned or drawn, before any change of geometry."""
        network = _drawn(cell.seed)
        if cell.start == SCRATCH:
            return network
        prior = load_prior(self.priors[cell.start])
        if cell.keep == "body":
            prior.head.load_state_dict(network.head.state_dict())
        _zero(prior.head.logits)
        return prior

    def network(self, cell: Cell) -> PaperCNN:
        """The cell's first network."""
        network = self.learned(cell)
        with torch.no_grad():
            for block in network.features:
                # GroupNorm divides by it again; its ε of 1e-5 is small beside the variance of what it normalises.
                block.conv.weight *= cell.body
                block.conv.bias *= cell.body
            for p in network.head.hidden.parameters():
                p *= cell.features
            network.head.logits.weight /= cell.features
        return network


@torch.no_grad()
def hidden_units(network: PaperCNN, images: Tensor) -> Tensor:
    """[N, 128], an example's from that example alone."""
    network = copy.deepcopy(network).to(images.device)  # the caller's stays where it is
    head = network.head
    return torch.cat([head.relu(head.hidden(head.flatten(network.features(x)))) for x in images.split(2000)])


def _zero(layer: nn.Linear) -> None:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)


@cache
def _state(seed: int) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {name: t.clone() for name, t in PaperCNN().state_dict().items()}


def _drawn(seed: int) -> PaperCNN:
    network = PaperCNN()
    network.load_state_dict(_state(seed))
    return network
