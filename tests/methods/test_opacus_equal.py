"""Given the same noise, our DP-SGD, DP-Adam and DP-AdamW are Opacus's engine around torch's optimizers."""

from __future__ import annotations

import warnings
from typing import Any

import opacus
import pytest
import torch
from method_trials import data, network
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon

STEPS, SIGMA, BOUND = 12, 0.7, 0.5


class SharedNoise:
    """The same numbers in the same order for whoever asks."""

    generator = None

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(8)

    def normal(self, like: Tensor, std: float) -> Tensor:
        return (torch.randn(like.shape, generator=self._generator, dtype=torch.float64) * std).to(like.dtype)


CASES: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "sgd": ("dp-sgd", {"momentum": 0.0, "weight_decay": 0.0}, torch.optim.SGD, {}),
    "momentum": ("dp-sgd", {}, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-4}),
    "nesterov": (
        "dp-sgd",
        {"nesterov": True},
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 1e-4, "nesterov": True},
    ),
    "adam": ("dp-adam", {}, torch.optim.Adam, {"weight_decay": 1e-4}),
    "adamw": ("dp-adamw", {}, torch.optim.AdamW, {"weight_decay": 1e-2}),
    "rmsprop": ("dp-rmsprop", {}, torch.optim.RMSprop, {"weight_decay": 1e-4}),
    "adagrad": ("dp-adagrad", {}, torch.optim.Adagrad, {"weight_decay": 1e-4}),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_opacus_and_torch(case: str, monkeypatch: Any) -> None:
    name, ours, kind, theirs = CASES[case]
    x, y = data(dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x))

    learner = dpivon.method(name, network().double(), dataset_size=len(x), lr=0.02, **ours)
    model, optimizer, batches = learner.make_private(
        dpivon.PrivacyEngine(), loader, noise_multiplier=SIGMA, max_grad_norm=BOUND
    )
    optimizer.noise = SharedNoise()
    for _ in range(STEPS):
        for bx, by in batches:  # q = 1: everyone
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(bx), by).backward()
            optimizer.step()

    noise = SharedNoise()
    monkeypatch.setattr(
        "opacus.optimizers.optimizer._generate_noise", lambda std, reference, **_: noise.normal(reference, std)
    )
    reference = network().double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus on its own hooks and on non-secure noise
        wrapped, private, same_batches = opacus.PrivacyEngine().make_private(
            module=reference,
            optimizer=kind(reference.parameters(), lr=0.02, **theirs),
            data_loader=loader,
            noise_multiplier=SIGMA,
            max_grad_norm=BOUND,
        )
        for _ in range(STEPS):
            for bx, by in same_batches:
                private.zero_grad()
                nn.functional.cross_entropy(wrapped(bx), by).backward()
                private.step()
    start = network().double()
    for p, q, s in zip(learner.model.parameters(), reference.parameters(), start.parameters(), strict=True):
        assert not torch.allclose(p, s)
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)
