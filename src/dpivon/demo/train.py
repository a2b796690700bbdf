"""One private training run: the ordinary PyTorch loop, with ε counted as it goes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpivon.demo.data import Split
from dpivon.demo.methods import Entry
from dpivon.diagnostics import Diagnostics
from dpivon.methods import Learner
from dpivon.methods import method as make
from dpivon.models import SmallCNN
from dpivon.posterior import Posterior
from dpivon.privacy import PrivacyEngine

BATCH_SIZE = 256
MAX_GRAD_NORM = 1.0
_PURPOSES = ("weights", "batches", "theta", "noise", "prediction", "masks")


@dataclass(frozen=True, eq=False)
class Run:
    """What a finished run leaves behind."""

    method: Entry
    learner: Learner
    epsilon: float
    noise_multiplier: float
    steps: int
    diagnostics: Diagnostics
    initial_std: float  # of IVON's posterior before the first step; 0 for the others

    @property
    def variational(self) -> bool:
        return self.initial_std > 0

    @property
    def posterior(self) -> Any:
        return self.learner.posterior()


def train(
    method: Entry,
    data: Split,
    *,
    epsilon: float,
    delta: float,
    epochs: int,
    seed: int,
    on_epoch: Callable[[int, float], None] = lambda epoch, spent: None,
) -> Run:
    """Train a :class:`SmallCNN` on ``data`` within (``epsilon``, ``delta``); a method that is not private, without either.

    Every method gets the same first weights, the same Poisson batches and the same stream of privacy noise.
    ``on_epoch(epoch, ε)`` is called after each epoch with what has been spent.
    """
    with torch.random.fork_rng(
        devices=[]
    ):  # layers draw their first weights from the global generator, and their masks
        torch.manual_seed(stream(seed, "weights").initial_seed())
        model: nn.Module = SmallCNN()
        torch.manual_seed(stream(seed, "masks").initial_seed())
        if not method.private:
            return _train_openly(method, model, data, epochs, seed, on_epoch)
        return _train(method, model, data, epsilon, delta, epochs, seed, on_epoch)


def _train(
    method: Entry,
    model: nn.Module,
    data: Split,
    epsilon: float,
    delta: float,
    epochs: int,
    seed: int,
    on_epoch: Callable[[int, float], None],
) -> Run:
    loader = DataLoader(TensorDataset(data.x, data.y), batch_size=BATCH_SIZE, generator=stream(seed, "batches"))
    theta = stream(seed, "theta")
    learner = make(method.key, model, dataset_size=len(data), lr=method.lr, generator=theta, **method.options)
    initial_std = _width(learner.posterior()) if learner.variational else 0.0
    engine = PrivacyEngine()
    # A fixed seed makes the noise reproducible, and so removable: right for a demonstration, wrong for real secrets.
    private_model, optimizer, private_loader = learner.make_private_with_epsilon(
        engine,
        loader,
        target_epsilon=epsilon,
        target_delta=delta,
        epochs=epochs,
        max_grad_norm=MAX_GRAD_NORM,
        noise_generator=stream(seed, "noise"),
    )
    engine.check(nn.functional.cross_entropy)
    diagnostics = Diagnostics(optimizer)
    for epoch in range(1, epochs + 1):
        for x, y in private_loader:
            optimizer.zero_grad()
            with learner.sample():
                nn.functional.cross_entropy(private_model(x), y).backward()
            optimizer.step()
            diagnostics.observe(len(engine.accountant))
        on_epoch(epoch, engine.get_epsilon(delta))
    return Run(
        method=method,
        learner=learner,
        epsilon=engine.get_epsilon(delta),
        noise_multiplier=optimizer.noise_multiplier,
        steps=len(engine.accountant),
        diagnostics=diagnostics,
        initial_std=initial_std,
    )


def _train_openly(
    method: Entry, model: nn.Module, data: Split, epochs: int, seed: int, on_epoch: Callable[[int, float], None]
) -> Run:
    """The same loop without an engine: shuffled batches, raw gradients, ε = ∞."""
    batches = stream(seed, "batches")
    loader = DataLoader(TensorDataset(data.x, data.y), batch_size=BATCH_SIZE, shuffle=True, generator=batches)
    theta = stream(seed, "theta")
    learner = make(method.key, model, dataset_size=len(data), lr=method.lr, generator=theta, **method.options)
    initial_std = _width(learner.posterior()) if learner.variational else 0.0
    diagnostics = Diagnostics(learner.optimizer)
    for epoch in range(1, epochs + 1):
        for x, y in loader:
            learner.optimizer.zero_grad()
            with learner.sample():
                nn.functional.cross_entropy(learner.model(x), y).backward()
            learner.optimizer.step()
            diagnostics.observe()
        on_epoch(epoch, math.inf)
    return Run(method, learner, math.inf, 0.0, epochs * len(loader), diagnostics, initial_std)


def _width(posterior: Posterior) -> float:
    return max(float(width.max()) for width in posterior.std.values())


def stream(seed: int, purpose: str) -> torch.Generator:
    """A generator of its own for each purpose, so that one method's θ-samples do not shift another's batches."""
    return torch.Generator().manual_seed(10 * seed + _PURPOSES.index(purpose))
