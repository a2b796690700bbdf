"""A small model, IVON on it and the loop that trains it, for the tests of the optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpivon import IVON

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randint(3, (16,), generator=torch.Generator().manual_seed(2))


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def make(model: nn.Module, seed: int = 3, **options: Any) -> IVON:
    options = {"lr": 0.1, "ess": 50.0, "beta2": 0.99, **options}
    return IVON(model.parameters(), generator=torch.Generator().manual_seed(seed), **options)


def loss_of(model: nn.Module, x: Tensor = X) -> Tensor:
    dtype = next(model.parameters()).dtype
    return nn.functional.cross_entropy(model(x.to(dtype)), Y[: len(x)])


def train(model: nn.Module, optimizer: IVON, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(optimizer.mc_samples):
            with optimizer.sampled_params(train=True):
                loss_of(model).backward()
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def same_state(left: IVON, right: IVON) -> bool:
    mine, theirs = left.state_dict()["state"], right.state_dict()["state"]
    return mine.keys() == theirs.keys() and all(
        mine[i].keys() == theirs[i].keys()
        and all(torch.equal(torch.as_tensor(mine[i][k]), torch.as_tensor(theirs[i][k])) for k in mine[i])
        for i in mine
    )
