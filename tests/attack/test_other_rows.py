"""Rows of the table that are about noise, batches and accounts: repeated by a fork or a copy, lowered by a checkpoint."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon.errors import DpivonError

N = 40


def private(sigma: float = 1.0) -> tuple[dpivon.PrivacyEngine, Any, Any, Any]:
    engine = dpivon.PrivacyEngine()
    model = nn.Linear(400, 3)
    x = torch.arange(N * 400.0).view(N, 400) / 1e4
    loader = DataLoader(TensorDataset(x, torch.zeros(N, dtype=torch.long)), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=sigma, max_grad_norm=1.0
    )
    return engine, *made


def released_noise(model: Any, optimizer: Any, loader: Any) -> Tensor:
    """A release of zero gradients, which is all noise."""
    x, y = next(iter(loader))
    optimizer.zero_grad()
    (0.0 * nn.functional.cross_entropy(model(x), y)).backward()
    optimizer.step()
    return torch.cat([g.flatten() for g in optimizer.last_release.gradients.values()])


@pytest.mark.os_entropy
def test_a_fork_does_not_repeat_the_noise(tmp_path: Path) -> None:
    _, *made = private()
    file = tmp_path / "of-the-child.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if child == 0:
        try:
            torch.save(released_noise(*made), file)
        finally:
            os._exit(0)
    ours = released_noise(*made)
    os.waitpid(child, 0)
    if file.exists():  # otherwise the child was refused
        theirs = torch.load(file, weights_only=True)
        assert abs(float(torch.corrcoef(torch.stack([ours, theirs]))[0, 1])) < 0.2


@pytest.mark.os_entropy
def test_a_copied_loader_does_not_repeat_the_batches() -> None:
    _, _, _, loader = private()
    try:
        other = copy.deepcopy(loader)
    except DpivonError:
        return
    batches = [[tuple(x[:, 0].tolist()) for x, _ in source] for source in (loader, other)]
    assert batches[0] != batches[1]


@pytest.mark.filterwarnings("ignore::dpivon.PrivacyWarning")  # of σ = 0
@pytest.mark.parametrize("sigma", [0.5, 0.0])
def test_a_checkpoint_of_another_run_does_not_lower_epsilon(tmp_path: Path, sigma: float) -> None:
    cheap, dear = private(sigma=8.0), private(sigma=sigma)
    for _, *made in (cheap, dear):
        released_noise(*made)
    cheap[0].save_checkpoint(path=tmp_path / "cheap.pt", module=cheap[1], optimizer=cheap[2])
    before = dear[0].get_epsilon(1e-5)
    with contextlib.suppress(DpivonError):  # refused
        dear[0].load_checkpoint(path=tmp_path / "cheap.pt", module=dear[1], optimizer=dear[2])
    assert dear[0].get_epsilon(1e-5) >= before
