"""Mechanisms and clipping rules that are not in the library, registered as a user would."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon.optim.tensors import TensorList
from dpivon.privacy.clipping import (
    FlatClipping,
    register_clipping,
)
from dpivon.privacy.mechanism import Mechanism, NoiseSpec, register_mechanism
from dpivon.stacked.networks import AnyNetwork
from dpivon.stacked.run import Run
from dpivon.stacked.stack import Stack

DECAY = 0.5


@register_mechanism
@dataclass(frozen=True)
class Correlated(Mechanism):
    """z_t − λ z_{t−1}: Σ_k λ^k S_{t−k} + z_t is a Gaussian mechanism of sensitivity C / (1 − λ) at every step."""

    decay: float = DECAY
    name = "test-correlated"

    def cost(self, spec):
        return spec.noise_multiplier * (1 - self.decay), 1.0

    def variance(self, spec):
        return (1 + self.decay**2) * super().variance(spec)

    def init(self, zeros):
        return {"last": zeros}

    def noise(self, draw, std, memory):
        z = draw(std)
        return z - memory["last"] * self.decay, {"last": z}


@register_mechanism
@dataclass(frozen=True)
class Discrete(Mechanism):
    """Discrete Gaussian noise on a grid (Canonne et al., 2020); ``size`` coordinates are each rounded by half a step."""

    size: int = 1
    name = "test-discrete"
    grid = 2.0**-6

    def cost(self, spec):
        c = spec.max_grad_norm
        return spec.noise_multiplier * c / (c + self.grid * math.sqrt(self.size)), 1.0

    def noise(self, draw, std, memory):
        def quantile(t, s):
            k = torch.arange(-round(9 * s / self.grid), round(9 * s / self.grid) + 1, dtype=torch.float64) * self.grid
            mass = torch.exp(-k.square() / (2 * s * s)).cumsum(0)
            return k[torch.searchsorted(mass / mass[-1], torch.special.ndtr(t)).clamp(max=len(k) - 1)]

        z = draw(1.0)
        if isinstance(z, TensorList):
            return TensorList([quantile(t, std) for t in z]), memory
        return torch.stack([quantile(t, float(s)) for t, s in zip(z, std, strict=True)]), memory


@register_clipping
class Normalised(FlatClipping):
    """Every example at about length C (Bu et al., *Automatic clipping*, 2023)."""

    name = "test-normalised"

    def factor(self, norm):
        return self.sensitivity / (norm + 0.01)


@register_clipping
class Careless(FlatClipping):
    """Bounds nothing."""

    name = "test-careless"

    def factor(self, norm):
        return torch.full_like(norm, 3.0)


def net():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def data(n=40):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 4, generator=generator) * 3, torch.randint(0, 2, (n,), generator=generator)


def private(folder=None, *, sigma=1.0, seed=0, engine=None, **options):
    torch.manual_seed(seed)
    model, (x, y) = net(), data()
    engine = engine or dpivon.PrivacyEngine(
        ledger=None if folder is None else folder / "ledger.jsonl", generator=torch.Generator().manual_seed(seed)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    made = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=sigma,
        **{"max_grad_norm": 1.0, **options},
    )
    return engine, *made


def train(model, optimizer, loader, on_step=lambda: None, passes=1):
    for _ in range(passes):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            on_step()


def spec_of(mechanism, sigma=2.0):
    return NoiseSpec(sigma, 1.0, 4.0, 0.25, mechanism=mechanism)


def runs(k=2, sigma=1.0):
    return [Run("dp-sgd", 5 + i, sigma, 1.0 + i, 0.1, 10) for i in range(k)]


def stack_of(**options):
    x, y = data()
    network = options.pop("network", AnyNetwork)(net)
    return Stack(options.pop("runs", None) or runs(), network, x, y, block=2, **options)
