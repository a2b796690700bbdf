"""Small models and a factory of private runs, with the rules of layers or with every layer run example by example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon.privacy.gradients import watching

EXAMPLES, FEATURES, CLASSES = 12, 5, 3


class CapturingNoise:
    """A noise source that records what is about to be noised, and adds nothing (or what it is told to)."""

    generator = None

    def __init__(self, answer: Callable[[Tensor], Tensor] = torch.zeros_like) -> None:
        self.answer = answer
        self.sums: list[Tensor] = []
        self.stds: list[float] = []
        self.fail = False

    def normal(self, like: Tensor, std: float) -> Tensor:
        if self.fail:
            raise RuntimeError("the noise source is broken")
        self.sums.append(like.detach().double().clone())
        self.stds.append(std)
        return self.answer(like)

    def releases(self, parameters: int) -> list[Tensor]:
        """Every release so far as one vector."""
        groups = [self.sums[i : i + parameters] for i in range(0, len(self.sums), parameters)]
        return [torch.cat([s.flatten() for s in group]) for group in groups]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, CLASSES),
    )


def data(n: int = EXAMPLES, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (n,), generator=generator)


def images(n: int = EXAMPLES, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 6, 6, generator=generator)
    return x, torch.randint(CLASSES, (n,), generator=generator)


@dataclass
class Run:
    """A private model, optimizer, loader and criterion, under the same names in every mode."""

    engine: dpivon.PrivacyEngine
    model: Any
    optimizer: Any
    loader: Any
    criterion: Any
    inner: Any
    noise: CapturingNoise | None = None

    def backward(self, x: Tensor, y: Tensor) -> None:
        self.criterion(self.model(x), y).backward()

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step by hand on a batch that was handed out."""
        self.optimizer.zero_grad()
        self.backward(x, y)
        self.optimizer.step()

    def release(self, x: Tensor, y: Tensor) -> Tensor:
        """The clipped sum of exactly this batch, as it is about to be noised: membership is forced, one draw is spent."""
        assert self.noise is not None
        next(iter(self.loader))
        before = len(self.noise.sums)
        self.step(x, y)
        return torch.cat([s.flatten() for s in self.noise.sums[before:]])

    @property
    def contributions(self) -> list[Tensor]:
        assert self.noise is not None
        return self.noise.releases(len(self.optimizer.params))


def make(mode: str = "bookkeeping", **options: Any) -> Run:
    """A run. Full batches (q = 1) unless ``batch_size`` says otherwise, so that membership is known."""
    torch.manual_seed(options.pop("seed", 0))
    x, y = options.pop("data", None) or data()
    module = options.pop("module", None) or mlp()
    optimizer = options.pop("optimizer", None)
    optimizer = optimizer(module) if callable(optimizer) else optimizer
    optimizer = optimizer or dpivon.IVON(module.parameters(), lr=0.1, ess=1e4)
    engine = options.pop("engine", None) or dpivon.PrivacyEngine(secure_mode=options.pop("secure_mode", False))
    loader = DataLoader(
        TensorDataset(x, y), batch_size=options.pop("batch_size", len(x)), num_workers=options.pop("workers", 0)
    )
    capture = options.pop("capture", True)
    criterion = options.pop("criterion", None) or nn.CrossEntropyLoss()
    call = options.pop("call", engine.make_private)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    options = {key: value for key, value in options.items() if value is not None}
    with without_rules() if mode == "alone" else nullcontext():
        made = call(module=module, optimizer=optimizer, data_loader=loader, **options)
    model, private, private_loader = made
    run = Run(engine, model, private, private_loader, criterion, optimizer)
    if capture:
        run.noise = private.noise = CapturingNoise()
    return run


@contextmanager
def without_rules() -> Iterator[None]:
    """Models that are made private inside have no layer with a rule: all of them run example by example."""
    missing = {"return_value": None}
    with mock.patch.object(watching, "rule_for", **missing), mock.patch.object(watching, "forward_for", **missing):
        yield


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def ivon(**options: Any) -> Callable[[nn.Module], dpivon.IVON]:
    return lambda module: dpivon.IVON(module.parameters(), **{"lr": 0.1, "ess": 1e4, **options})


C = 0.01  # a bound that clips everything in `alike`


def alike(n: int = EXAMPLES) -> tuple[Tensor, Tensor]:
    """n equal examples with large gradients: each contributes exactly C in the same direction, so that ‖S‖/C counts them."""
    x, _ = data(1)
    return 10.0 * x.repeat(n, 1), torch.zeros(n, dtype=torch.long)


def count(total: Tensor, bound: float = C) -> float:
    return float(total.norm()) / bound


def parameters(run: Run) -> list[Tensor]:
    return [p.detach().clone() for p in run.optimizer.params]
