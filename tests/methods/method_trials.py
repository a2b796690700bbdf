"""One small problem and one training loop, for every method."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon import Release

N, FEATURES, CLASSES, BATCH, SIGMA = 24, 5, 3, 8, 1.0


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def data(seed: int = 0, n: int = N, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, FEATURES, generator=generator).to(dtype), torch.randint(CLASSES, (n,), generator=generator)


@dataclass
class Trial:
    """A method under privacy. ``model`` is what the loop calls, ``learner.model`` the network inside."""

    learner: dpivon.Learner
    engine: dpivon.PrivacyEngine
    model: Any
    optimizer: Any
    loader: Any
    theta: torch.Generator
    noise: torch.Generator

    def pass_over(self, x: Tensor, y: Tensor) -> Tensor:
        with self.learner.sample():
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
        return loss

    def step(self, x: Tensor, y: Tensor) -> None:
        """A step on exactly this batch: one draw of the loader is spent on it."""
        next(iter(self.loader))
        self.optimizer.zero_grad()
        self.pass_over(x, y)
        self.optimizer.step()

    def tensors(self) -> Iterator[Tensor]:
        """All that was learned: the network, the optimizer's state, the averages."""
        yield from (t.detach() for t in self.learner.model.state_dict().values())
        yield from flat(self.optimizer.state_dict())

    @property
    def random_forward(self) -> bool:
        """Whether two training passes over the same batch differ, as with dropout or sampled layers."""
        network = self.learner.model
        x = torch.ones(2, FEATURES).to(next(network.parameters()))
        with torch.no_grad():
            return any(not torch.equal(network(x), network(x)) for _ in range(3))


def flat(value: Any) -> Iterator[Tensor]:
    """The tensors and numbers in nested state, in a fixed order."""
    if isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from flat(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield torch.tensor(float(value), dtype=torch.float64)


def start(
    name: str,
    *,
    model: nn.Module | None = None,
    batch: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    private: dict[str, Any] | None = None,
    **options: Any,
) -> Trial:
    model = (network() if model is None else model).to(dtype)
    x, y = data(dtype=dtype) if batch is None else batch
    theta, noise = torch.Generator().manual_seed(seed + 1), torch.Generator().manual_seed(seed + 2)
    learner = dpivon.method(name, model, dataset_size=N, generator=theta, **options)
    engine = dpivon.PrivacyEngine()
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, generator=torch.Generator().manual_seed(seed + 3))
    settings = {"noise_multiplier": SIGMA, "max_grad_norm": 1.0, "noise_generator": noise, **(private or {})}
    made, optimizer, private_loader = learner.make_private(engine, loader, **settings)
    return Trial(learner, engine, made, optimizer, private_loader, theta, noise)


def same(a: Trial, b: Trial) -> bool:
    ours, theirs = list(a.tensors()), list(b.tensors())
    assert len(ours) == len(theirs) > 4
    return all(torch.equal(s, t) for s, t in zip(ours, theirs, strict=True))


def finite(trial: Trial) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in trial.learner.model.parameters())


class FrozenReleases:
    """Stands in for the mechanism: charges, then releases the same numbers whatever the sums are."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.generator = torch.Generator().manual_seed(99)

    def __call__(self, clipped_sums: Any, spec: Any, noise: Any, charge: Any) -> Release:
        charge(spec)
        self.sums.append(torch.cat([s.flatten().double() for s in clipped_sums.values()]))
        frozen = {
            p: torch.randn(s.shape, generator=self.generator, dtype=torch.float64) for p, s in clipped_sums.items()
        }
        return Release(frozen, spec.variance)


def with_frozen_releases(trial: Trial, batch: tuple[Tensor, Tensor], monkeypatch: Any) -> Tensor:
    frozen = FrozenReleases()
    monkeypatch.setattr("dpivon.privacy.mechanism.release", frozen)
    for _ in range(4):
        trial.step(*batch)
    return torch.stack(frozen.sums)
