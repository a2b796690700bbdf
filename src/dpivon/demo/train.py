"""One private training run: the ordinary PyTorch loop, with ε counted as it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpivon.demo.data import Split
from dpivon.demo.methods import Method
from dpivon.diagnostics import Diagnostics
from dpivon.models import SmallCNN
from dpivon.optim import IVON
from dpivon.posterior import Posterior
from dpivon.privacy import PrivacyEngine

BATCH_SIZE = 256
MAX_GRAD_NORM = 1.0
_PURPOSES = ("weights", "batches", "theta", "noise", "prediction")


@dataclass(frozen=True, eq=False)
class Run:
    """What a finished run leaves behind."""

    method: Method
    model: nn.Module
    posterior: Posterior
    epsilon: float
    noise_multiplier: float
    steps: int
    diagnostics: Diagnostics
    initial_std: float  # of the posterior before the first step; 0 for a point estimate

    @property
    def variational(self) -> bool:
        return self.initial_std > 0


def train(
    method: Method,
    data: Split,
    *,
    epsilon: float,
    delta: float,
    epochs: int,
    seed: int,
    on_epoch: Callable[[int, float], None] = lambda epoch, spent: None,
) -> Run:
    """Train a :class:`SmallCNN` on ``data`` within (``epsilon``, ``delta``).

    Every method gets the same first weights, the same Poisson batches and the same stream of privacy noise.
    ``on_epoch(epoch, ε)`` is called after each epoch with what has been spent.
    """
    with torch.random.fork_rng(devices=[]):  # layers draw their first weights from the global generator
        torch.manual_seed(stream(seed, "weights").initial_seed())
        model: nn.Module = SmallCNN()
    loader = DataLoader(TensorDataset(data.x, data.y), batch_size=BATCH_SIZE, generator=stream(seed, "batches"))
    optimizer = method.make(model.parameters(), method.lr, len(data), stream(seed, "theta"))
    initial_std = _width(optimizer.posterior(model)) if isinstance(optimizer, IVON) else 0.0
    engine = PrivacyEngine()
    # A fixed seed makes the noise reproducible, and so removable: right for a demonstration, wrong for real secrets.
    private_model, private_optimizer, private_loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=epsilon,
        target_delta=delta,
        epochs=epochs,
        max_grad_norm=MAX_GRAD_NORM,
        noise_generator=stream(seed, "noise"),
    )
    diagnostics = Diagnostics(private_optimizer)
    for epoch in range(1, epochs + 1):
        for x, y in private_loader:
            private_optimizer.zero_grad()
            with private_optimizer.sampled_params(train=True) if initial_std else nullcontext():
                nn.functional.cross_entropy(private_model(x), y).backward()
            private_optimizer.step()
            diagnostics.observe(len(engine.accountant))
        on_epoch(epoch, engine.get_epsilon(delta))
    return Run(
        method=method,
        model=model,
        posterior=private_optimizer.posterior(),
        epsilon=engine.get_epsilon(delta),
        noise_multiplier=private_optimizer.noise_multiplier,
        steps=len(engine.accountant),
        diagnostics=diagnostics,
        initial_std=initial_std,
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from a second thread, and on a busy machine waiting for it costs minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _width(posterior: Posterior) -> float:
    return max(float(width.max()) for width in posterior.std.values())


def stream(seed: int, purpose: str) -> torch.Generator:
    """A generator of its own for each purpose, so that one method's θ-samples do not shift another's batches."""
    return torch.Generator().manual_seed(10 * seed + _PURPOSES.index(purpose))
