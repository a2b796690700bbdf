"""What is audited: a model, the method that trains it, its loss, data, and the path by which gradients are privatised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpivon.errors import bad, check_choice
from dpivon.methods import METHODS
from dpivon.stacked.networks import cross_entropy

Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[nn.Module], Optimizer]

#: Ways from a batch to a release: book-keeping by the layers' rules, the same with layers that have none and run example by
#: example, on two processes, and two of a stack of runs ("captured" is the traced, padded program).
ENGINE_PATHS = ("bookkeeping", "alone", "distributed")
STACK_PATHS = ("stacked", "captured")
PATHS = (*ENGINE_PATHS, *STACK_PATHS)
#: Those that can average over views.
VARIED_PATHS = ("bookkeeping", "alone", *STACK_PATHS)
#: Opacus's names for ways to compute gradients.
MODES = ("hooks", "functorch", "ew", "ghost")


def check_path(path: Any) -> None:
    """Refuse what is not a path."""
    if path in MODES:
        raise bad("path", path, "is not a path: every grad_sample_mode means book-keeping", "Use path='bookkeeping'")
    check_choice("path", path, PATHS, "Choose a way to compute clipped sums")


@dataclass(frozen=True)
class Setting:
    """The public constants of a run under audit. ``batch`` is b, and q = b/N."""

    sigma: float = 1.3
    bound: float = 0.7
    size: int = 13
    batch: float = 13.0
    lr: float | None = None
    seed: int = 0
    runs: int = 1
    ladder: bool = False  # whether run k of a stack has noise (k + 1)σ
    twins: bool = False  # whether the runs of a stack are one run, several times
    mc_samples: int = 1

    @property
    def rate(self) -> float:
        return self.batch / self.size

    def but(self, **changes: Any) -> Setting:
        return replace(self, **changes)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model as the user brings it. ``loss(outputs, labels)`` gives one loss an example.

    ``method`` is a name of ``dpivon methods``, or a function that makes an optimizer for a model. The model itself is
    never trained: every run of the audit gets a copy.
    """

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    method: str | MakeOptimizer = "dp-ivon-gradsq"
    path: str = "bookkeeping"
    loss: Loss = cross_entropy
    seed: int = 0  # of all randomness in its runs
    views: int = 1  # of every example, all alike, so that their mean is what one of them gives
    autocast: bool = False  # whether all of a step is made inside the caller's bf16 autocast

    def __post_init__(self) -> None:
        check_path(self.path)
        if isinstance(self.method, str) and self.method not in METHODS:
            raise bad("method", self.method, "is not a known method", f"Use one of {', '.join(map(repr, METHODS))}")
        if self.stacked and not isinstance(self.method, str):
            raise bad(
                "method", self.method, f"cannot be stacked on path={self.path!r}", "Name a method, or use another path"
            )
        if self.views > 1 and self.path not in VARIED_PATHS:
            fix = f"Use one of {', '.join(map(repr, VARIED_PATHS))}"
            raise bad("views", self.views, f"is not for path={self.path!r}", fix)
        if self.stacked and self.views > 1 and self.inputs.dim() != 4:
            problem = f"are of pictures on path={self.path!r}, and the inputs have shape {tuple(self.inputs.shape)}"
            raise bad(
                "views", self.views, problem, "Give inputs of shape [N, channels, height, width], or another path"
            )
        if len(self.inputs) != len(self.labels) or len(self.inputs) < 4:
            raise bad("data", (len(self.inputs), len(self.labels)), "is too small", "Give at least 4 labelled examples")

    @property
    def stacked(self) -> bool:
        return self.path in STACK_PATHS

    @property
    def name(self) -> str:
        return self.method if isinstance(self.method, str) else getattr(self.method, "__name__", "own optimizer")

    def build(self) -> nn.Module:
        return copy.deepcopy(self.model)

    def but(self, **changes: Any) -> Subject:
        return replace(self, **changes)

    def around_a_step(self) -> AbstractContextManager[Any]:
        """What the caller has switched on while a step is made."""
        return torch.autocast(self.inputs.device.type, torch.bfloat16) if self.autocast else nullcontext()

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def silent_loss(self) -> Subject:
        """The same, with a loss that has no gradient: a release is then all noise."""
        loss = self.loss
        return self.but(loss=lambda outputs, labels: 0.0 * loss(outputs, labels))


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
    return Subject(model, _pictures(x), torch.randint(3, (12,), generator=generator), method, path, **varied)


def _pictures(x: Tensor) -> Tensor:
    """[N, n] as pictures of one row."""
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
    x = _pictures(torch.ones(4, width))
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
    labels = torch.zeros(examples, dtype=torch.long)
    x = _pictures(torch.cat([half, half * (1 + 3e-7)], 1))
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

    Example j is a multiple of the unit vector e_j, so that canaries are told apart and do not disturb each other.
    """
    unit = nn.Linear(canaries, 1, bias=False)
    nn.init.zeros_(unit.weight)
    labels = torch.zeros(canaries, dtype=torch.long)
    model, x = nn.Sequential(nn.Flatten(), unit), _pictures(10.0 * torch.eye(canaries))
    return subject.but(model=model, inputs=x, labels=labels, loss=_output_itself)


def _output_itself(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.squeeze(1)
