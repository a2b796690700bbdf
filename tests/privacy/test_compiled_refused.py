"""What engine.compile cannot capture: it is named, and runs eagerly."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_compiled_step import CLASSES, losses, made, network
from torch import Tensor, nn


def _train(engine: Any, loader: Any, loss_fn: Any, given: Any = lambda batch: batch) -> Any:
    step = engine.compile(loss_fn, capture=True)
    for batch in loader:
        step(given(batch))
    return step


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.inner = 0, network()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)


def drawing(model: nn.Module, batch: Any) -> Tensor:
    return losses(model, batch) * (1.0 + 0.0 * random.random())


def branching(model: nn.Module, batch: Any) -> Tensor:
    each = losses(model, batch)
    return each if float(each.detach().sum()) > 0 else 2 * each


@pytest.mark.parametrize(
    ("module", "loss_fn", "reason"),
    [
        (Counts, losses, "changes attributes"),
        (network, drawing, "draws random numbers"),
        (network, branching, "_local_scalar_dense|item|data-dependent|proxy"),
        (lambda: nn.Sequential(*network(), Scale()), losses, "without a rule"),
    ],
    ids=["attributes", "random", "values", "rules"],
)
def test_what_cannot_be_captured_is_named_and_runs_eagerly(module, loss_fn, reason):
    engine, _, _, loader = made(module=module())
    with pytest.warns(UserWarning, match=reason):
        step = _train(engine, loader, loss_fn)
    assert step.path.startswith("eager (")
    assert len(engine.accountant) == len(loader)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CLASSES, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.flatten()


def test_a_batch_that_is_not_tensors_alone_runs_eagerly():
    engine, _, _, loader = made()

    def named(model: nn.Module, batch: Any) -> Tensor:
        return losses(model, batch["rows"])

    with pytest.warns(UserWarning, match="holds a str"):
        _train(engine, loader, named, lambda batch: {"rows": batch, "name": "a"})
    assert len(engine.accountant) == len(loader)
