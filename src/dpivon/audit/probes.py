"""Small networks on made-up data, on which a check is sharp, and examples that go as far as an example can."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.audit.session import MakeOptimizer, Subject
from dpivon.stacked.networks import cross_entropy

EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "ordinary": lambda x: x,
    "opposite": lambda x: -x,
    "scaled by 30": lambda x: 30.0 * x,
    "scaled by 1e6": lambda x: 1e6 * x,
    "scaled by 1e-6": lambda x: 1e-6 * x,
    "zero": lambda x: 0.0 * x,
    "NaN": lambda x: torch.full_like(x, math.nan),
    "one NaN": lambda x: torch.where(torch.arange(x.numel()).reshape(x.shape) == 0, math.nan, x),
    "Inf": lambda x: torch.full_like(x, math.inf),
    "overflowing": lambda x: torch.full_like(x, 3e38),
}


def probe(path: str, method: str | MakeOptimizer, **varied: Any) -> Subject:
    """A small network on made-up data. One layer is used twice. ``varied`` is ``views`` and ``autocast``; in the last a
    layer has several positions, over which its gradient is added up."""
    generator = torch.Generator().manual_seed(11)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model: nn.Module = Uses(2)
        if varied.get("autocast"):
            model = nn.Sequential(nn.Conv2d(1, 6, (1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3))
    x = torch.randn(12, 5, generator=generator)
    return Subject(model, _images(x), torch.randint(3, (12,), generator=generator), method, path, **varied)


def _images(x: Tensor) -> Tensor:
    """[N, n] as images of one row."""
    return x.view(len(x), 1, 1, -1)


class Uses(nn.Module):
    """Its middle layer is applied several times, so that its gradient is a sum with cross terms."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.first, self.middle, self.last, self.times = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3), times
        with torch.no_grad():  # its uses then have alike inputs and gradients, and the cross terms are large
            self.middle.weight.copy_(torch.eye(6) + 0.1 * self.middle.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1)).tanh()
        for _ in range(self.times):
            h = self.middle(h)
        out: Tensor = self.last(h)
        return out


def wide_probe(subject: Subject, width: int = 160) -> Subject:
    """Two layers of width² coordinates each, on which statistics of the noise are sharp, by the subject's path and method."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12)
        layers = [nn.Linear(width, width, bias=False) for _ in range(2)]
        model = nn.Sequential(nn.Flatten(), *layers)
    x = _images(torch.ones(4, width))
    labels = torch.zeros(4, dtype=torch.long)
    return subject.but(model=model, inputs=x, labels=labels, loss=cross_entropy).silent_loss()


def cancelling_probe(subject: Subject, examples: int = 8) -> Subject:
    """A layer and a table, each used on two halves of an example that are almost equal, by the subject's path and method.

    What the halves give is subtracted, so that a gradient is little more than the rounding of what it is made of.
    """
    generator = torch.Generator().manual_seed(14)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(14)
        model = Cancelling()
    half = 1e6 * torch.randn(examples, 16, generator=generator)
    labels = torch.arange(examples).remainder(
        4
    )  # one output that is far above the others must not silence all examples
    x = _images(torch.cat([half, half * (1 + 3e-7)], 1))
    return subject.but(model=model, inputs=x, labels=labels, loss=cross_entropy)


class Cancelling(nn.Module):
    """Two uses of a linear layer, and two of every row of a table, with opposite signs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(16, 40), nn.Embedding(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.flatten(1).chunk(2, 1)
        linear = self.layer(first) - self.layer(second)
        rows = torch.arange(4, device=x.device).remainder(2).expand(len(x), 4)
        found = self.table(rows) * torch.cat([first, -second], 1).view(len(x), 4, 8)
        return linear.view(len(x), 4, 10).sum(2) + found.sum(1).view(len(x), 4, 2).sum(2)


def canary_probe(subject: Subject, canaries: int) -> Subject:
    """One linear unit, by the subject's path and method. Its loss is its output, so that the gradient of an example is the
    example itself, at every θ.

    Example j is a multiple of the unit vector e_j, so that canaries are distinct and do not disturb each other.
    """
    unit = nn.Linear(canaries, 1, bias=False)
    nn.init.zeros_(unit.weight)
    labels = torch.zeros(canaries, dtype=torch.long)
    model, x = nn.Sequential(nn.Flatten(), unit), _images(10.0 * torch.eye(canaries))
    return subject.but(model=model, inputs=x, labels=labels, loss=_output_itself)


def _output_itself(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.squeeze(1)


def with_extremes(subject: Subject, members: int = 12, at: int = 2) -> tuple[Subject, dict[str, int]]:
    """The first examples of the data, and after them example ``at`` driven to every extreme, each under the next one's label.

    Data that are not numbers on a line, such as tokens, cannot be scaled: of those only ordinary and repeated examples.
    Also where each extreme stands.
    """
    x, y = subject.inputs[:members], subject.labels[:members]
    kinds = EXTREMES if x.is_floating_point() else {"ordinary": EXTREMES["ordinary"]}
    extras = [*(change(x[at]) for change in kinds.values()), x[at]]
    labels = [y[(at + 1) % len(y)]] * len(kinds) + [y[at]]
    larger = subject.but(inputs=torch.cat([x, torch.stack(extras)]), labels=torch.cat([y, torch.stack(labels)]))
    return larger, {kind: len(x) + i for i, kind in enumerate([*kinds, "duplicated"])}
