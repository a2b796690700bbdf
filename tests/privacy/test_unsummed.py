"""Biases and normalisations that are added up with others of their size, against those that are added up layer by layer."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from benchmarks.overhead import as_on_a_gpu
from torch import nn

from dpivon.privacy.clipping import FlatClipping
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.gradients.side_by_side import in_blocks
from dpivon.privacy.layers import bounded, unsummed
from dpivon.privacy.layers.unsummed import Unsummed
from dpivon.privacy.layers.uses import Dense, merge
from dpivon.privacy.precision import surroundings

WIDTH, TOKENS = 64, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rms = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.two(self.rms(F.gelu(self.one(self.norm(x))).float()))


def clipped_sums(*, as_gpu, spoiled=False, joint=True, left_out=None):
    """Of a batch of a few layers in bf16, and the kinds of uses that backward left."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)])
    parameters = list(model.parameters())
    keeper = BookKeeper(model, batch_first=True, loss_reduction="sum")
    x = torch.randn(4, TOKENS, WIDTH)
    if spoiled:
        x[1, 3] = torch.inf
    x = x if left_out is None else torch.cat([x[:left_out], x[left_out + 1 :]])
    clipping = FlatClipping(0.5)
    with as_on_a_gpu() if as_gpu else nullcontext(), mock.patch.object(bounded, "MADE_BYTES", 0):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        out.float().square().sum((1, 2)).sum().backward()
        kinds = {type(merge(uses)) for uses in keeper._passes.batches[0].values()}
        if not joint:
            uses = [merge(keeper._passes.batches[0][p]) for p in parameters]
            return [use.squared_norm() for _, use in in_blocks(parameters, uses, joint=False)], kinds
        return keeper.clipped_sums(parameters, clipping), kinds


@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("room", [2**20, 1])
def test_sums_and_norms_are_those_of_each_by_itself(room, spoiled):
    """Also where there is room for one layer at a time, and where an example is not finite."""
    apart, kinds = clipped_sums(as_gpu=False, spoiled=spoiled)
    assert Unsummed not in kinds
    with mock.patch.object(unsummed, "memory_cap", return_value=room):
        together, kinds = clipped_sums(as_gpu=True, spoiled=spoiled)
    assert Unsummed in kinds
    for one, other in zip(together, apart, strict=True):
        assert torch.isfinite(one).all()
        assert float(one.norm()) > 0
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("left_out", range(4))
def test_one_example_moves_the_sum_by_at_most_the_bound(left_out):
    with_all, _ = clipped_sums(as_gpu=True)
    without, _ = clipped_sums(as_gpu=True, left_out=left_out)
    moved = torch.cat([(a - b).flatten() for a, b in zip(with_all, without, strict=True)]).norm()
    assert 0.25 < float(moved) <= 0.5 * (1 + 1e-5)


def test_so_are_norms_where_every_parameter_is_clipped_by_itself():
    apart, _ = clipped_sums(as_gpu=False, joint=False)
    together, kinds = clipped_sums(as_gpu=True, joint=False)
    assert Unsummed in kinds
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-9)


def test_one_that_is_made_by_itself_is_the_dense_one():
    g, x = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    for use, expected in (
        (Unsummed(g), g.sum(1)),
        (Unsummed(g, x, (F.layer_norm, (4,), 1e-5)), (g * F.layer_norm(x, (4,))).sum(1)),
    ):
        dense, c = Dense(expected), torch.rand(3)
        torch.testing.assert_close(use.materialise(), expected)
        torch.testing.assert_close(use.squared_norm(), dense.squared_norm())
        torch.testing.assert_close(use.weighted_sum(c), dense.weighted_sum(c))
        torch.testing.assert_close(use.grouped(3).materialise(), dense.grouped(3).materialise())
        dropped = torch.tensor([True, False, False])
        torch.testing.assert_close(use.without(dropped).materialise(), dense.without(dropped).materialise())


def test_rows_that_are_added_up_first_and_large_ones_are_not_left():
    g = torch.zeros(2, 3, 4)
    with as_on_a_gpu():
        assert unsummed.left_unsummed(g)
        with surroundings(rows=2):
            assert not unsummed.left_unsummed(g)
        with mock.patch.object(unsummed, "COPIED", 95):
            assert not unsummed.left_unsummed(g)
        with mock.patch.object(unsummed, "COPIED", 191):
            assert unsummed.left_unsummed(g)
            assert not unsummed.left_unsummed(g, g)  # a normalisation's two operands
            assert not unsummed.left_unsummed(g, one_pass=True)
    assert not unsummed.left_unsummed(g)
