"""A head of a size that tensor cores do not like computes with zeros behind its columns, and gives what the layer gives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dpivon.privacy.clipping import FlatClipping
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.layers import bounded, linear
from dpivon.privacy.precision import padded, padded_empty


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    for module in (linear, bounded):
        monkeypatch.setattr(module, "launches_cost", lambda t: True)
    monkeypatch.setattr(linear, "_LARGE", 8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 21, bias=False)

    def forward(self, x):
        z = self.head(torch.tanh(self.body(x)))
        z[..., 0] += 1.0  # which its caller may do to what a layer returns
        return z


def run(model, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = model(x)
    nn.functional.cross_entropy(z.flatten(0, 1).float(), y.flatten(), reduction="none").view(y.shape).sum(
        1
    ).mean().backward()
    return z.detach()


def test_a_head_computed_with_more_columns_gives_the_layer_s_own_sums(as_on_a_gpu):
    torch.manual_seed(0)
    model, x, y = Model(), torch.randn(4, 5, 6), torch.randint(21, (4, 5))
    plain = copy.deepcopy(model)
    keeper = BookKeeper(model, batch_first=True, loss_reduction="mean")
    seen = []
    model.head.register_forward_hook(lambda layer, args, z: seen.append(z.stride()))
    torch.testing.assert_close(run(model, x, y), run(plain, x, y).float(), rtol=1e-2, atol=1e-2)
    assert seen == [(5 * 24, 24, 1)]
    sums = keeper.clipped_sums(list(model.parameters()), FlatClipping(1e6))
    for total, p in zip(sums, plain.parameters(), strict=True):
        torch.testing.assert_close(total.float() / 4, p.grad, rtol=2e-2, atol=2e-3)


def test_one_that_is_copied_or_trained_unwatched_is_the_layer_s_own(as_on_a_gpu):
    model = Model()
    keeper = BookKeeper(model, batch_first=True, loss_reduction="mean")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert copy.deepcopy(model).head(torch.zeros(2, 3, 16)).is_contiguous()
        with keeper.unwatched():
            assert model.head(torch.zeros(2, 3, 16)).is_contiguous()
        assert linear.head(model.head, torch.zeros(2, 3, 16)).is_contiguous()  # its weight wants a gradient
    assert not linear.is_head(nn.Linear(16, 21))
    assert not linear.is_head(nn.Linear(16, 24, bias=False))


def test_zeros_are_behind_columns_only_where_they_were_put():
    t = padded_empty((2, 3, 5), torch.zeros(1)).fill_(1.0)
    assert padded(t).data_ptr() == t.data_ptr()
    assert torch.equal(padded(t)[..., 5:], torch.zeros(2, 3, 3, dtype=torch.bfloat16))
    for other in (torch.ones(2, 3, 8).bfloat16()[..., :5], t[:1], t[..., :4]):  # alike, but of the caller's, or a part
        wider = padded(other)
        assert wider.data_ptr() != other.data_ptr()
        assert torch.equal(wider[..., : other.shape[2]], other)
        assert not wider[..., other.shape[2] :].any()
