"""Networks and public inputs of the tests of a prior's features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import dpivon
from dpivon.models import SmallCNN


def network(classes: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, classes))


def public() -> Tensor:
    return torch.randn(500, 3, generator=torch.Generator().manual_seed(9))


def small() -> SmallCNN:
    torch.manual_seed(2)
    return SmallCNN()


def pictured(rows: int = 500) -> Tensor:
    return torch.randn(rows, 1, 8, 8, generator=torch.Generator().manual_seed(4))


def plain(model: nn.Module, **metadata: str) -> dpivon.Posterior:
    named = {n: p.detach().clone() for n, p in model.named_parameters()}
    return dpivon.Posterior(named, {n: torch.ones_like(p) for n, p in named.items()}, metadata)
