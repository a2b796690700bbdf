"""The parts of book-keeping's fast paths that have several ways: each gives the norms and sums of the others."""

from __future__ import annotations

import pytest
import torch
from benchmarks.overhead import as_on_a_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from per_example_loop import book, both_precisions, small_cnn
from torch import nn

from dpivon.models.standardised import StandardisedConv2d
from dpivon.privacy.clipping import FlatClipping, PerLayerClipping, row_norms
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.layers import Dense, Outer, Rows, uses
from dpivon.privacy.layers.conv import standardised_conv, standardised_forward

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:Using padding=.same.")


@given(positions=st.integers(1, 12), rows=st.integers(1, 6), batch=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_embedding_norms_pair_by_pair_and_by_sorting_agree(positions, rows, batch):
    torch.manual_seed(positions)
    use = Rows(torch.randint(0, rows, (batch, positions)), torch.randn(batch, positions, 3), torch.Size((rows, 3)))
    exact = use.materialise().double().square().sum((1, 2))
    torch.testing.assert_close(use.squared_norm().double(), exact, rtol=1e-5, atol=1e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uses, "_SHORT", 0)
        by_sorting = Rows(use.index, use.g, use.shape)
        torch.testing.assert_close(by_sorting.squared_norm().double(), exact, rtol=1e-5, atol=1e-6)
    c = torch.rand(batch, dtype=torch.float64)
    both = by_sorting.weighted_sum(c), use.weighted_sum(c)
    for total in both:
        torch.testing.assert_close(
            total, torch.einsum("b,brd->rd", c, use.materialise().double()), rtol=1e-5, atol=1e-6
        )


def test_many_small_parameters_side_by_side_are_clipped_as_they_are_one_by_one():
    """Flat clipping joins them; per-layer clipping with a bound that no example reaches must give the same sums."""
    torch.manual_seed(0)
    model, x = small_cnn().double(), torch.randn(6, 3, 8, 8, dtype=torch.float64)
    weight = torch.randn(8192, dtype=torch.float64)
    joined = book(model, x, weight, FlatClipping(1e9))
    apart = book(model, x, weight, PerLayerClipping((1e9,) * len(joined)))
    for a, b in zip(joined, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("examples", [0, 1, 63, 64, 65, 128, 130])
@pytest.mark.parametrize("positions", [0, 1, 3])
def test_sums_and_norms_of_any_number_of_examples(examples, positions):
    """Blocks of 64 examples and the rest, and blocks of 256 coordinates and the rest, are left out where there are none."""
    torch.manual_seed(examples)
    a, g, c = torch.randn(examples, positions, 32), torch.randn(examples, positions, 8), torch.rand(examples)
    each = torch.einsum("btd,btp->bpd", a.double(), g.double())
    exact = torch.einsum("b,bpd->pd", c.double(), each)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    outer = Outer(a, g, torch.Size((8, 32)))
    torch.testing.assert_close(outer.weighted_sum(c), exact, **tolerance)
    torch.testing.assert_close(Outer(a, g, torch.Size((32, 8)), True).weighted_sum(c), exact.mT, **tolerance)
    for width in (31, 256):  # less than a block, one block; a block and the rest below
        some = each.flatten(1)[:, :width].float()
        torch.testing.assert_close(row_norms(some), some.double().norm(dim=1), rtol=1e-6, atol=0)
    more = torch.cat([each.flatten(1), each[:, 0]], 1).float()
    torch.testing.assert_close(row_norms(more), more.double().norm(dim=1), rtol=1e-6, atol=0)
    torch.testing.assert_close(Dense(each.float()).weighted_sum(c), exact, **tolerance)


def test_bf16_operands_are_added_up_in_fp32_and_weighted_in_parts():
    """Weighted gradients that cancel over the positions: rounded to bf16 they would not, even in two parts."""
    torch.manual_seed(0)
    a = (torch.randn(64, 256, 8) * 0.01 + 30).to(torch.bfloat16)
    g = torch.randn(64, 256, 4)
    g = (g - g.mean(1, keepdim=True)).to(torch.bfloat16)
    c = torch.rand(64)
    exact = (a.double().mT @ (g.double() * c.double().view(-1, 1, 1))).sum(0).mT
    one_part = (a.double().mT @ (g * c.view(-1, 1, 1)).to(torch.bfloat16).double()).sum(0).mT
    ours = Outer(a, g, torch.Size((4, 8))).weighted_sum(c)
    assert (one_part - exact).norm() > 1e-3 * exact.norm()  # the trap is real
    assert (ours - exact).norm() < 2e-5 * exact.norm()


@pytest.mark.parametrize("cap", [uses.MEMORY_CAP, 0])
def test_standardised_convolutions(monkeypatch, cap):
    """Materialised, and as outer products whose sum is pulled back once; one channel whose weights are almost equal."""
    monkeypatch.setattr(uses, "MEMORY_CAP", cap)
    torch.manual_seed(0)
    first, second = StandardisedConv2d(3, 4, 3, stride=2, padding=1), StandardisedConv2d(4, 5, 1, bias=False)
    with torch.no_grad():
        first.weight[1] = 0.3 + 1e-4 * torch.randn(3, 3, 3)
    model = nn.Sequential(first, nn.GroupNorm(2, 4), nn.ReLU(), second)
    both_precisions(model, torch.randn(4, 3, 6, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cap", [uses.MEMORY_CAP, 0])
def test_a_standardised_forward_and_the_rule_come_to_the_same_bits(monkeypatch, cap, dtype):
    """Outputs, and gradients of examples; also of a row at its floor, and where the forward's findings are too coarse."""
    monkeypatch.setattr(uses, "MEMORY_CAP", cap)
    torch.manual_seed(0)
    layer = StandardisedConv2d(3, 4, 3, padding=1).to(dtype)
    with torch.no_grad():
        layer.weight[1] = 0.3
    x, g = torch.randn(5, 3, 6, 6, dtype=dtype), torch.randn(5, 4, 6, 6, dtype=dtype)
    observed = []
    z = standardised_forward(layer, lambda z, uses: observed.append(uses) or z, x)
    assert torch.equal(z, layer(x))
    assert not z.requires_grad
    kept, again = observed[0](g), standardised_conv(layer, (x,), g)
    assert set(kept) == set(again) == {layer.weight, layer.bias}
    for p in again:
        assert type(kept[p]) is type(again[p])
        assert torch.equal(kept[p].squared_norm(), again[p].squared_norm())
        assert torch.equal(kept[p].weighted_sum(torch.rand(5).fill_(0.3)), again[p].weighted_sum(torch.full((5,), 0.3)))


def test_a_forward_that_puts_the_batch_first_is_not_used_where_it_is_second():
    made = {}
    for batch_first in (True, False):
        layer = StandardisedConv2d(3, 4, 3)
        keeper = BookKeeper(nn.Sequential(layer), batch_first=batch_first, loss_reduction="mean")
        made[batch_first] = list(keeper._watched)
    assert len(made[True]) == 1
    assert made[False] == []


@pytest.mark.parametrize("few", [uses._FEW_BYTES, 0])
def test_the_branches_of_a_gpu_agree_with_the_loop(monkeypatch, few):
    """Convolutions, norms and last layers, of which a few gradients are made where that saves launches."""
    monkeypatch.setattr(uses, "_FEW_BYTES", few)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5), nn.Linear(5, 2)
    )
    with as_on_a_gpu():
        both_precisions(model, torch.randn(4, 3, 6, 6))


def test_standardised_weights_have_mean_zero_and_norm_one():
    layer = StandardisedConv2d(3, 8, 3)
    rows = layer.standardised().flatten(1)
    torch.testing.assert_close(rows.mean(1), torch.zeros(8), rtol=0, atol=1e-6)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(8))
