"""Ghost clipping's own traps, which book-keeping shares.

Each is a known way in which a variational optimizer and a privacy engine have lost the guarantee together.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from private_runs import (
    CLASSES,
    EXAMPLES,
    FEATURES,
    C,
    alike,
    count,
    data,
    make,
)
from torch import Tensor, nn

from dpivon import DpivonError, PrivacyError


class Squared(nn.Module):
    """Regression with a loss of shape (batch, outputs)."""

    reduction = "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(
            output, F.one_hot(target, CLASSES).float()[:, : output.shape[1]] * 100, reduction=self.reduction
        )


@pytest.mark.parametrize("outputs", [1, CLASSES])
def test_losses_with_a_trailing_dimension_are_clipped_example_by_example(mode, outputs):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, outputs))
    run = make(mode, module=copy.deepcopy(net), criterion=Squared(), max_grad_norm=C)
    reference = make("functorch", module=net, criterion=Squared(), max_grad_norm=C)
    total = run.release(*data())
    assert count(total) <= EXAMPLES
    torch.testing.assert_close(total, reference.release(*data()), rtol=1e-4, atol=1e-6)


class ReducesAnyway(nn.Module):
    reduction = "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target).reshape(1)


def test_a_criterion_that_reduces_to_one_loss_is_refused_in_ghost_mode():
    run = make("ghost", criterion=ReducesAnyway(), max_grad_norm=C, data=alike())
    x, y = next(iter(run.loader))
    with pytest.raises(DpivonError, match=r"12 examples|one loss an example"):
        run.backward(x, y)
    with pytest.raises(PrivacyError):
        run.optimizer.step()
    assert run.contributions == []


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's, used by function."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(FEATURES, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.embedding(tokens).mean(1), self.embedding.weight)


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class TiedByLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(FEATURES, 4)
        self.head = Head(self.embedding.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(1))


@pytest.mark.parametrize("network", [Tied, TiedByLayer])
@pytest.mark.parametrize("kind", ["ghost", "bookkeeping", "hooks"])
def test_a_weight_used_in_two_places_is_clipped_as_a_whole_or_refused(network, kind):
    tokens = torch.randint(FEATURES, (1, 3), generator=torch.Generator().manual_seed(0))
    target = torch.tensor([1])
    run = make(kind, module=network(), data=(tokens, target), max_grad_norm=C)
    try:
        total = run.release(tokens, target)
    except DpivonError:
        assert run.contributions == []
    else:
        assert count(total) <= 1 + 1e-5


def test_ghost_mode_refuses_autocast():
    run = make("ghost")
    x, y = next(iter(run.loader))
    with pytest.raises(PrivacyError, match="autocast"), torch.autocast("cpu", dtype=torch.bfloat16):
        run.backward(x, y)
