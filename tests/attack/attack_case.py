"""A case of the attack matrix: a network, a batch and a loss as a person might write them, and how they are used."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Ways to train. "compiled" (torch.compile in the caller's own loop) joins them here and in harness.RUNNERS.
PATHS = ("own loop", "fit", "stacked", "ddp")
ROWS, FEATURES, CLASSES = 9, 4, 3  # an odd batch: 1/9 and 1/8 are rounded differently

Built = tuple[nn.Module, tuple[Any, Any], Callable[..., Tensor]]


@dataclass(frozen=True, eq=False)
class Case:
    """One row of the matrix.

    Attributes:
        name: says what a person wrote.
        row: the kind of attack that it belongs to, by its number, or "—".
        make: makes (model, (inputs, targets), loss); called with equal seeds it makes equal ones.
        each: the same loss as ``fit`` wants it, one per example; None where it cannot be written so.
        whole: the loss takes (model, batch) instead of (outputs, targets).
        loop: replaces the plain training loop.
        options: further arguments of ``make_private``.
        optimizer: makes the optimizer from the model's parameters.
        around: a context in which all of a step runs, such as autocast.
        paths: where it can be tried at all.
        bounds: values of C; by default one that clips nobody and one that clips everybody.
        tolerance: how far the sum may be from the fp64 loop, relative to what was added up; None where the forward is
            random and there is nothing to compare with.
        removed: which rows are removed in turn; by default the first, the last, and the largest gradient's.
        must: whether every user needs it, so that a refusal is a failure too.
        fast: whether it is tried in the fast part.
    """

    name: str
    row: str
    make: Callable[[], Built]
    each: Callable[[Tensor, Tensor], Tensor] | None
    whole: bool = False
    loop: Callable[[Any], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=0.0)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    paths: tuple[str, ...] = PATHS
    bounds: tuple[float, ...] | None = None
    tolerance: float | None = 1e-3
    removed: tuple[int, ...] | None = None
    must: bool = False
    fast: bool = False

    def build(self) -> Built:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(7)
            return self.make()

    @property
    def batch_dim(self) -> int:
        return 0 if self.options.get("batch_first", True) else 1


CASES: dict[str, Case] = {}
_SAME: Any = object()


def case(name: str, row: int | str = "—", *, each: Any = _SAME, **options: Any) -> Callable[[Any], Any]:
    """Register a function that builds a case. ``each`` defaults to the per-example form of the loss, where it is known."""

    def register(make: Callable[[], Built]) -> Callable[[], Built]:
        assert name not in CASES, name
        made = Case(name, str(row), make, None if each is _SAME else each, **options)
        CASES[name] = replace(made, each=_EACH.get(made.build()[2])) if each is _SAME else made
        return make

    return register


# ---- networks


class Net(nn.Module):
    """A network made of named parts and a forward that gets them: ``Net(lambda m, x: m.fc(x), fc=nn.Linear(4, 3))``."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.program = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.program(self, *args, **kwargs)


def mlp(*between: nn.Module, features: int = FEATURES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, 6), *between, nn.Tanh(), nn.Linear(6, CLASSES))


def p(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 2 + 0.5)


# ---- batches


def labels(n: int = ROWS, *more: int) -> Tensor:
    return torch.randint(CLASSES, (n, *more))


def vectors(n: int = ROWS, features: int = FEATURES) -> tuple[Tensor, Tensor]:
    return torch.randn(n, features), labels(n)


def sequences(n: int = ROWS, length: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(n, length, FEATURES), labels(n)


def images(n: int = ROWS, channels: int = 2, side: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(n, channels, side, side), labels(n)


def tokens(n: int = ROWS, length: int = 5, vocabulary: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randint(vocabulary, (n, length)), labels(n)


# ---- losses


def ce(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def ce_each(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def token_ce(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens of a batch of equally long sequences."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def token_ce_each(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1).sum(1) - targets).square().mean()


def square_each(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1).sum(1) - targets).square()


_EACH = {ce: ce_each, token_ce: token_ce_each, square: square_each}


# ---- trees of tensors


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(change, v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        parts = [mapped(change, v) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    found: list[Tensor] = []
    mapped(lambda t: found.append(t) or t, value)  # type: ignore[func-returns-value]
    return iter(found)
