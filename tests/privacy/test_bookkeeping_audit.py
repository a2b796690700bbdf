"""Ways in which book-keeping could be wrong without an error: overwritten inputs, two forwards, underflow, checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpivon import PrivacyError
from dpivon.privacy.clipping import FlatClipping, clipped_sum
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.layers import Outer


def keep(model, reduction="sum"):
    return BookKeeper(model, batch_first=True, loss_reduction=reduction)


def sums_of(model, x, bound=1.0):
    keeper = keep(model)
    model(x).square().sum().backward()
    sums = keeper.clipped_sums(list(model.parameters()), FlatClipping(bound))
    keeper.detach_from_model()
    return sums


def looped(model, x, bound=1.0):
    rows = [torch.autograd.grad(model(x[i : i + 1]).square().sum(), list(model.parameters())) for i in range(len(x))]
    return clipped_sum([torch.stack(g).double() for g in zip(*rows, strict=True)], FlatClipping(bound))


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class Doubles(nn.Module):
    """Changes what its second layer saw after it saw it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x)
        out = self.second(h)
        return out + h.mul_(2.0)


def test_an_input_that_is_overwritten_before_backward_is_an_error():
    model = Doubles()
    keeper = keep(model)
    loss = model(torch.randn(3, 4)).square().sum()
    with pytest.raises(PrivacyError, match="changed in place"):
        loss.backward()
    keeper.detach_from_model()


def test_an_attention_input_that_is_overwritten_before_backward_is_an_error():
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    keeper, x = keep(model), torch.randn(3, 5, 4)
    loss = model(x, x, x)[0].square().sum()
    x.zero_()
    with pytest.raises(PrivacyError, match="changed in place"):
        loss.backward()
    keeper.detach_from_model()


def test_a_batch_that_is_overwritten_between_backward_and_step_is_an_error():
    model = nn.Linear(4, 2)
    keeper, x = keep(model), torch.randn(3, 4)
    model(x).sum().backward()
    x.copy_(torch.randn(3, 4))  # the next batch, read into the same memory
    with pytest.raises(PrivacyError, match="changed in place"):
        keeper.clipped_sums(list(model.parameters()), FlatClipping(1.0))


def test_activations_that_overwrite_a_layers_output_are_fine():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Dropout(0.0, inplace=True))
    x = torch.randn(5, 4)
    assert_same(sums_of(model, x), looped(model, x))


def test_two_forwards_in_one_backward_are_an_error():
    """Row i of both would be clipped together, and the example that is in one of them could move the sum by 2C."""
    model = nn.Linear(4, 2)
    keeper = keep(model)
    (model(torch.randn(3, 4)).sum() + model(torch.randn(3, 4)).sum()).backward()
    with pytest.raises(PrivacyError, match="second forward"):
        keeper.clipped_sums(list(model.parameters()), FlatClipping(1.0))


def test_a_forward_without_a_backward_does_not_count():
    model = nn.Linear(4, 2)
    keeper, x = keep(model), torch.randn(3, 4)
    model(x)
    model(x).sum().backward()
    keeper.clipped_sums(list(model.parameters()), FlatClipping(1.0))


class Twice(nn.Module):
    """One layer, plain and in a checkpoint."""

    def __init__(self, reentrant):
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x):
        return checkpoint(self.layer, self.layer(x).tanh(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_runs_both_inside_and_outside_a_checkpoint(reentrant):
    model, x = Twice(reentrant), torch.randn(5, 4)
    plain = Twice(reentrant=False)
    plain.load_state_dict(model.state_dict())
    assert_same(sums_of(model, x), looped(plain, x))


def test_a_hook_that_changes_the_output_and_was_there_first():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(5, 4)
    model[0].register_forward_hook(lambda layer, args, output: 3.0 * output)
    assert_same(sums_of(model, x, 1e6), looped(model, x, 1e6))


class Adds(nn.Module):
    """Returns its input where there is nothing to add; its parameter then has no gradient."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))
        self.used = True

    def forward(self, x):
        return x + self.bias if self.used else x


def test_a_layer_that_returns_its_input_leaves_the_callers_tensor_alone():
    model, x = nn.Sequential(Adds(), nn.Linear(4, 2)), torch.randn(3, 4)
    keeper = keep(model)
    model[0].used = False
    model(x)
    assert not x.requires_grad
    keeper.detach_from_model()


@pytest.mark.parametrize("positions", [1, 3])
def test_norms_of_tiny_gradients_against_huge_inputs_do_not_vanish(positions):
    a, g = 1e18 * torch.randn(2, positions, 5), 1e-24 * torch.randn(2, positions, 6)
    use = Outer(a, g, torch.Size((6, 5)))
    exact = (g.double().mT @ a.double()).square().sum((1, 2))
    torch.testing.assert_close(use.squared_norm().double(), exact, rtol=1e-4, atol=0)


def test_an_example_with_huge_values_before_a_normalisation_is_clipped():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 64, bias=False)

        def forward(self, x):
            return F.layer_norm(self.layer(x), (64,))

    torch.manual_seed(0)
    model, x, t = Normalised(), torch.zeros(1024, 4), torch.randn(64)
    x[0] = 1e18 * torch.randn(4)
    keeper = keep(model, "mean")
    (1e-2 * (model(x) * t).sum(1)).mean().backward()
    (total,) = keeper.clipped_sums(list(model.parameters()), FlatClipping(1e-2))
    assert 0 < total.norm() <= 1e-2 * (1 + 1e-5)


def test_a_layer_called_without_its_model_is_an_error():
    """Nothing then knows the batch: two of them in one step would be clipped as one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    keeper = keep(model)
    with pytest.raises(PrivacyError, match="outside the forward"):
        (model[0](torch.randn(3, 4)).sum() + model[0](torch.randn(3, 4)).sum()).backward()
    keeper.detach_from_model()
