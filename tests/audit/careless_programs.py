"""Models and losses that somebody might write, in which one example reaches further than its own clipped gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpivon.errors import PrivacyError
from dpivon.privacy.engine import PrivacyEngine
from dpivon.privacy.losses import PerExampleLoss

ROWS, WIDTH, CLASSES = 12, 4, 3
WEIGHTS = torch.tensor([1.0, 5.0, 25.0])
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@dataclass(frozen=True)
class Program:
    """A training loop. ``checks`` is whether it calls ``engine.check``; ``unchecked`` is what it gives to ``make_private``."""

    build: Callable[[], nn.Module]
    loss: Loss = plain
    positions: int = 0  # of an example, if it has several
    steps: int = 1
    checks: bool = False
    unchecked: bool = False
    bound: float = 1e-3  # C
    neighbours: bool = True  # whether it can be run without one of its examples

    def outcome(self) -> str:
        """ "refused" by the library, "right", or what is wrong, on made-up data."""
        try:
            whole, kept = self._run(range(ROWS))
            without, kept_without = self._run(range(ROWS - 1)) if self.neighbours else (whole, kept)
        except PrivacyError:
            return "refused"
        moved = float((whole - without).norm()) / self.bound
        if not moved <= 1 + 1e-5:
            return f"one example moves the sum by {moved:.2f} C"
        if any(not torch.equal(a, b) for a, b in zip(kept, kept_without, strict=True)):
            return "what the model keeps depends on an example"
        off = float((whole - self._definition()).norm()) / self.bound
        return "right" if off <= 1e-3 else f"the sum is off by {off:.2f} C"

    def _run(self, rows: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """The clipped sum of the last step, and all that the model keeps: tensors, and what it then gives for public inputs."""
        x, y = (t[: len(rows)] for t in self._data())
        model, engine = self._model(), PrivacyEngine()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            private, optimizer, loader = engine.make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
                data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
                noise_multiplier=0.0,
                max_grad_norm=self.bound,
                unchecked=self.unchecked,
            )
            if self.checks:
                engine.check(lambda model, batch: self.loss(model, *batch))
            for _ in range(self.steps):
                next(iter(loader))
                optimizer.zero_grad()
                self.loss(private, x, y).backward()
                optimizer.step()
        total = torch.cat([optimizer.last_release.gradients[p].flatten() for p in optimizer.params]).double() * len(x)
        model.eval()
        with torch.no_grad():
            answer = model(torch.ones_like(self._data()[0]))
        return total, [answer, *model.buffers(), *model.parameters()]

    def _definition(self) -> Tensor:
        model, total = self._model().double(), torch.zeros(())
        params = list(model.parameters())
        x, y = self._data()
        for i in range(ROWS):
            loss = self.loss(model, x[i : i + 1].double(), y[i : i + 1])
            g = torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)])
            total = total + g * min(1.0, self.bound / float(g.norm()))
        return total

    def _model(self) -> nn.Module:
        torch.manual_seed(1)
        return self.build()

    def _data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(2)
        shape = (ROWS, self.positions, WIDTH) if self.positions else (ROWS, WIDTH)
        return torch.randn(shape, generator=generator) + 1.0, torch.arange(ROWS) % CLASSES


# ---- models


class Two(nn.Module):
    """Two layers, with something between or before them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x).tanh())


class Folded(Two):
    """The positions of an example are rows of their own."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.reshape(-1, WIDTH)).view(len(x), -1, CLASSES).mean(1)


class Centred(Two):
    """The mean of the batch is subtracted, as a normalisation of one's own does."""

    def forward(self, x: Tensor) -> Any:
        h = self.first(x).tanh()
        return self.last(h - h.mean(0))


class Turned(Two):
    """Rows change places before the last layer, and back after it: every output is its own row's."""

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x).tanh().flip(0)).flip(0)


class Scaled(Two):
    """A bare parameter of shape [1, d], divided by its norm: expanded to one copy per example, the norm is of all copies."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * self.scale / self.scale.norm())


class Written(Two):
    """A buffer is written to where torch counts no write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.seen.data.copy_(x.detach().mean(0))
        return super().forward(x)


class Replaced(Written):
    """A buffer is replaced by another tensor."""

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.seen = x.detach().mean(0)
        return Two.forward(self, x)


class Remembering(Two):
    """A plain attribute is a running mean of training batches, from pass ``after`` on, and subtracted in evaluation."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.passes, self.mean = after, 0, torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        if not self.training:
            return super().forward(x - self.mean)
        self.passes += 1
        if self.passes > self.after:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean()
        return super().forward(x)


# ---- losses


def weighted(z: Tensor, y: Tensor) -> Tensor:
    """One loss per row, divided by the weight of all rows."""
    w = WEIGHTS.to(z)[y]
    return F.cross_entropy(z, y, reduction="none") * w / w.sum() * len(y)


def weighted_each(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return PerExampleLoss(weighted)(model(x), y)


def weighted_mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return weighted(model(x), y).mean()


def weighted_by_torch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = model(x)
    return F.cross_entropy(z, y, weight=WEIGHTS.to(z))


def in_halves(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if len(x) == 1:
        return plain(model, x, y)
    half = len(x) // 2
    return (plain(model, x[:half], y[:half]) + plain(model, x[half:], y[half:])) / 2


def with_penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain(model, x, y) + sum(p.square().sum() for p in model.parameters())
