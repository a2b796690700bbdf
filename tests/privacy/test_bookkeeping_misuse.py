"""Every way to misuse book-keeping: refused, not silent."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from per_example_loop import small_cnn
from torch import nn

from dpivon import PrivacyError
from dpivon.privacy.clipping import FlatClipping
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.layers import register_rule

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:Using padding=.same.")


class Functional(nn.Module):
    """Uses a weight behind its layer's back."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return F.linear(self.layer(x), self.layer.weight)


def test_functional_use_of_a_parameter_is_an_error_not_silence():
    model = Functional()
    keeper = BookKeeper(model, batch_first=True, loss_reduction="mean")
    model(torch.randn(3, 4)).sum().backward()
    with pytest.raises(PrivacyError, match="outside its layer"):
        keeper.clipped_sums(list(model.parameters()), FlatClipping(1.0))


def test_rows_that_are_not_examples_are_an_error():
    class Flattened(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x.reshape(-1, 4)).reshape(len(x), -1)

    model = Flattened()
    BookKeeper(model, batch_first=True, loss_reduction="mean")
    with pytest.raises(PrivacyError, match="saw 15 rows in a batch of 5"):
        model(torch.randn(5, 3, 4)).sum().backward()


def test_a_second_pass_before_the_step_is_an_error():
    model = small_cnn()
    keeper = BookKeeper(model, batch_first=True, loss_reduction="mean")
    for _ in range(2):
        model(torch.randn(2, 3, 8, 8)).sum().backward()
    with pytest.raises(PrivacyError, match="second forward and backward"):
        keeper.clipped_sums(list(model.parameters()), FlatClipping(1.0))


def test_a_second_backward_through_one_forward_is_an_error():
    model = nn.Sequential(nn.Linear(3, 2))
    BookKeeper(model, batch_first=True, loss_reduction="mean")
    loss = model(torch.randn(4, 3)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(PrivacyError, match="second backward"):
        loss.backward()


def test_backward_through_an_earlier_batch_is_an_error():
    model = nn.Sequential(nn.Linear(3, 2))
    keeper = BookKeeper(model, batch_first=True, loss_reduction="mean")
    loss = model(torch.randn(4, 3)).sum()
    keeper.forget_passes()
    with pytest.raises(PrivacyError, match="earlier batch"):
        loss.backward()


def test_a_failing_forward_leaves_the_weights_trainable():
    class Failing(nn.Linear):
        def forward(self, x):
            raise RuntimeError("out of memory")

    register_rule(Failing)(lambda layer, inputs, g: {})
    model = nn.Sequential(Failing(3, 2))
    BookKeeper(model, batch_first=True, loss_reduction="mean")
    with pytest.raises(RuntimeError, match="out of memory"):
        model(torch.randn(4, 3))
    assert all(p.requires_grad for p in model.parameters())


def test_evaluation_is_not_watched():
    model = small_cnn().eval()
    keeper = BookKeeper(model, batch_first=True, loss_reduction="mean")
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(PrivacyError, match="without per-example gradients"):
        keeper.clipped_sums(list(model.parameters()), FlatClipping(1.0))
