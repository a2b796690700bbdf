"""A layer's input is rounded to bf16 once, for the product and for its rule: the same sums to the bit."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from torch import nn

from dpivon.models import TextEncoder, WideResNet
from dpivon.privacy.clipping import FlatClipping
from dpivon.privacy.gradients import watching
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.layers import attention, conv
from dpivon.privacy.precision import as_multiplied


def pictures(standardise):
    return WideResNet(depth=10, width=1, groups=4, standardised=standardise), torch.randn(5, 3, 8, 8)


MODELS = {
    "convolutions": lambda: pictures(False),
    "standardised": lambda: pictures(True),
    "attention": lambda: (TextEncoder(vocabulary=50, width=16, heads=2, depth=1), torch.randint(0, 50, (5, 7))),
}


def sums(model, x):
    keeper = BookKeeper(model, batch_first=True, loss_reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    out.float().square().sum().backward()
    found = keeper.clipped_sums(list(model.parameters()), FlatClipping(0.1))
    keeper.detach_from_model()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_sums_are_the_same_to_the_bit(name):
    model, x = MODELS[name]()
    once = sums(model, x)
    with ExitStack() as stack:
        for module in (watching, attention, conv):
            stack.enter_context(patch.object(module, "as_multiplied", lambda t: t))
        twice = sums(model, x)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    assert any(t.count_nonzero() for t in once)


def test_only_the_callers_autocast_rounds():
    x = torch.randn(3, 4)
    assert as_multiplied(x) is x
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(as_multiplied(x), x.bfloat16())
        assert as_multiplied(x.double()).dtype == torch.float64  # autocast leaves it as it is, too
        with torch.autocast("cpu", enabled=False):
            assert as_multiplied(x) is x


def test_a_layer_that_is_not_only_a_product_sees_its_input_as_it_is():
    """A subclass may do anything with what it gets before it multiplies."""
    seen = []

    class Shifted(nn.Linear):
        def forward(self, x):
            seen.append(x.dtype)
            return super().forward(x - 1.0)

    model = nn.Sequential(Shifted(4, 2))
    keeper = BookKeeper(model, batch_first=True, loss_reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(3, 4))
    keeper.detach_from_model()
    assert seen == [torch.float32]
