"""Networks, inputs and ways to the sum on which norm and sum could be rounded apart, and how far one example moves the sum."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.models.standardised import StandardisedConv2d
from dpivon.privacy.clipping import EPS_NUM, FlatClipping
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.kernels.padded import PaddedGradients
from dpivon.privacy.kernels.reference import Batch, LoopedGradients
from dpivon.privacy.layers import uses
from dpivon.privacy.precision import full_precision
from dpivon.stacked.networks import AnyNetwork

POSITIONS, FEATURES = 4, 6
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])


class Tokens(nn.Module):
    """One linear layer at several positions, whose outputs are subtracted from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * SIGNS.to(x).view(1, -1, 1)).sum(1)


class Shared(nn.Module):
    """One linear layer, called once for each of two inputs."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, 0]) - self.layer(x[:, 1])


class Pooled(nn.Module):
    """A convolution, a normalisation that takes its offset away, and a linear layer."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.last = conv, nn.GroupNorm(2, 4), nn.Linear(4 * POSITIONS * FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(x.unsqueeze(1))).tanh().flatten(1))


class Table(nn.Module):
    """Positions look up few rows of a table, so that some are looked up again, and scale what they find."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(3, FEATURES)
        self.head = nn.Linear(FEATURES, 3, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(POSITIONS).remainder(2).expand(len(x), -1)
        found = self.table(rows) * x * SIGNS.to(x).roll(1).cumsum(0).sign().view(1, -1, 1)
        found = found[:, :2].sum(1) - found[:, 2:].sum(1)
        return self.head(found)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh().mean(1))


class Attends(nn.Module):
    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.attention, self.apart = nn.MultiheadAttention(FEATURES, 2, batch_first=True), apart

    def forward(self, x: Tensor) -> Tensor:
        key = x.flip(1) if self.apart else x
        return self.attention(x, key, key)[0].mean(1)


class Bare(nn.Module):
    """A parameter of its own beside a layer, at several positions that are subtracted from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.randn(1, 1, FEATURES)), nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x * self.scale * SIGNS.to(x).view(1, -1, 1)).sum(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(POSITIONS * FEATURES, 5), nn.Tanh(), nn.Linear(5, 3)),
    "one weight": lambda: nn.Sequential(nn.Flatten(), nn.Linear(POSITIONS * FEATURES, 1, bias=False)),
    "tokens": Tokens,
    "shared": Shared,
    "shared and wide": lambda: Shared(40),
    "convolution": lambda: Pooled(nn.Conv2d(1, 4, 3, padding=1)),
    "standardised convolution": lambda: Pooled(StandardisedConv2d(1, 4, 3, padding=1)),
    "embedding": lambda: Table(tied=False),
    "tied embedding": lambda: Table(tied=True),
    "layer norm": Normalised,
    "bare parameter": Bare,
    "attention": lambda: Attends(apart=False),
    "cross attention": lambda: Attends(apart=True),
}


def paired(x: Tensor, by: float) -> Tensor:
    """Positions in pairs that differ in the last bits only."""
    x = x.clone()
    x[:, 1::2] = x[:, ::2] * (1 + by)
    return x


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda x: x,
    "large": lambda x: 1e6 * x,
    "small": lambda x: 1e-6 * x,
    "huge": lambda x: 1e18 * x,
    "subnormal": lambda x: 1e-40 * x,
    "alike": lambda x: x[:1].expand_as(x).clone(),
    "large and alike": lambda x: 1e6 * x[:1].expand_as(x),
    "constant": lambda x: torch.full_like(x, 0.7),
    "cancelling": lambda x: paired(1e3 * x, 0.0),
    "cancelling but for the last bits": lambda x: paired(1e3 * x, 3e-7),
    "large and cancelling": lambda x: paired(1e7 * x, 3e-7),
    "cancelling and alike": lambda x: paired(1e6 * x[:1].expand_as(x), 3e-7),
    "offset 1e3": lambda x: x + 1e3,
    "offset 1e6": lambda x: x + 1e6,
    "mixed scales": lambda x: x * torch.logspace(-12, 12, len(x)).view(-1, 1, 1),
    "mixed positions": lambda x: x * torch.logspace(-9, 9, POSITIONS).view(1, -1, 1),
}


def loss_of(scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, labels: scale * (outputs * torch.linspace(-1.3, 0.9, outputs.shape[1]).to(outputs)).sum(1)


def own_loop(model: nn.Module, x: Tensor, loss: Any, bound: float, reduction: str = "sum", whole: Any = None) -> Tensor:
    """The caller's own loop; ``whole`` is the loss of the outputs of a batch, if it is not the reduced ``loss``."""
    model = copy.deepcopy(model)
    keeper = BookKeeper(model, batch_first=True, loss_reduction=reduction)
    params = [p for p in model.parameters() if p.requires_grad]
    outputs = model(x)
    (getattr(loss(outputs, None), reduction)() if whole is None else whole(outputs)).backward()
    with full_precision():
        return torch.cat([s.flatten() for s in keeper.clipped_sums(params, FlatClipping(bound))])


def eager(*args: Any) -> Tensor:
    return own_loop(*args)


def mean_loss(*args: Any) -> Tensor:
    return own_loop(*args, reduction="mean")


def unmade(*args: Any) -> Tensor:
    """With no room for gradients of several examples at once."""
    before, uses.MEMORY_CAP = uses.MEMORY_CAP, 0
    try:
        return eager(*args)
    finally:
        uses.MEMORY_CAP = before


def looped(model: nn.Module, x: Tensor, loss: Any, bound: float) -> Tensor:
    """What stacks and ``dpivon.fit`` do on a CPU."""
    network = AnyNetwork(lambda: copy.deepcopy(model), loss=loss)
    gradients = LoopedGradients(network, torch.float32)
    return gradients.clipped_sums(network.pack(model)[None], all_of(x), torch.tensor([bound]))[0]


def captured(model: nn.Module, x: Tensor, loss: Any, bound: float) -> Tensor:
    """The traced program, as it is recorded for a GPU, with a place to spare."""
    network = AnyNetwork(lambda: copy.deepcopy(model), loss=loss)
    gradients = PaddedGradients(network, x.device, torch.float32, at_once=1024)
    return gradients.clipped_sums(network.pack(model)[None], all_of(x, spare=1), torch.tensor([bound]))[0]


def all_of(x: Tensor, spare: int = 0) -> Batch:
    n = len(x)
    rows = torch.arange(n + spare)
    model = torch.zeros(n, dtype=torch.long)
    return Batch(x, torch.zeros(n, dtype=torch.long), model, torch.tensor([0, n]), rows[None], torch.arange(n))


PATHS: dict[str, Callable[..., Tensor]] = {
    "eager": eager,
    "eager, mean": mean_loss,
    "eager, unmade": unmade,
    "looped": looped,
    "captured": captured,
}


def moved(
    path: str, network: str, inputs: str, *, examples: int, bound: float, scale: float, seed: int = 0
) -> list[float]:
    """How far S moves, in units of C, when the first, a middle and the last example are removed."""
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    x = INPUTS[inputs](torch.randn(examples, POSITIONS, FEATURES)).contiguous()
    whole = PATHS[path](model, x, loss_of(scale), bound)
    out = []
    for gone in sorted({0, examples // 2, examples - 1}):
        kept = torch.arange(examples) != gone
        none = torch.zeros_like(whole)
        less = PATHS[path](model, x[kept], loss_of(scale), bound) if kept.any() else none
        out.append(float((whole - less).norm()) / bound)
    return out


def agreement(path: str, network: str, inputs: str, *, examples: int, bound: float, scale: float) -> float:
    """How far S is from the definition, a loop over examples in double, in units of what was summed."""
    torch.manual_seed(0)
    model = NETWORKS[network]()
    x, loss = INPUTS[inputs](torch.randn(examples, POSITIONS, FEATURES)).contiguous(), loss_of(scale)
    got = PATHS[path](model, x, loss, bound)
    wide = copy.deepcopy(model).double()
    params, rows = list(wide.parameters()), []
    for i in range(examples):
        grads = torch.autograd.grad(loss(wide(x[i : i + 1].double()), None).sum(), params)
        rows.append(torch.cat([g.flatten() for g in grads]))
    norms = [float(row.norm()) for row in rows]
    factors = [min(1.0, bound / (norm + EPS_NUM)) for norm in norms]
    expected = sum((c * row for c, row in zip(factors, rows, strict=True)), torch.zeros_like(rows[0]))
    return float((got - expected).norm()) / max(c * norm for c, norm in zip(factors, norms, strict=True))
