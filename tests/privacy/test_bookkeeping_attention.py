"""Attention's rule against a loop over examples, and against the layer itself."""

from __future__ import annotations

import pytest
import torch
from per_example_loop import book, both_precisions
from torch import nn

from dpivon import ArgumentError
from dpivon.privacy.clipping import FlatClipping
from dpivon.privacy.gradients.bookkeeping import BookKeeper

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:Using padding=.same.")


class CrossAttention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        out, _ = self.attention(x, x.flip(1), x * 0.5, attn_mask=mask)
        return out


@pytest.mark.parametrize("bias", [True, False])
def test_cross_attention_with_a_mask(bias):
    torch.manual_seed(0)
    both_precisions(CrossAttention(bias=bias), torch.randn(3, 4, 8))


class MaskedSelfAttention(nn.Module):
    """Without weights, as an encoder calls it: the scores never lie in memory."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = x[:, -1, 0] > 0
        return self.attention(x, x, x, padding, need_weights=False, attn_mask=mask)[0]


def test_self_attention_without_weights():
    torch.manual_seed(0)
    x = torch.randn(4, 5, 8)
    assert 0 < int((x[:, -1, 0] > 0).sum()) < 4
    both_precisions(MaskedSelfAttention(), x)


def test_an_example_that_is_not_finite_does_not_reach_the_others_through_attention():
    torch.manual_seed(0)
    model, weight = MaskedSelfAttention(), torch.randn(8192)
    x = torch.randn(4, 5, 8)
    x[1, 2, 3] = float("nan")
    got = book(model, x, weight, FlatClipping(0.5), reduction="sum")
    expected = book(model, x[[0, 2, 3]], weight, FlatClipping(0.5), reduction="sum")
    for e, g in zip(expected, got, strict=True):
        torch.testing.assert_close(e, g)


def test_attention_computes_what_the_layer_computes():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    for options in ({}, {"key_padding_mask": padding}, {"average_attn_weights": False}, {"need_weights": False}):
        expected, expected_weights = layer(x, x, x, **options)
        keeper = BookKeeper(layer, batch_first=True, loss_reduction="mean")
        out, weights = layer(x, x, x, **options)
        keeper.detach_from_model()
        torch.testing.assert_close(out, expected)
        if expected_weights is not None:
            torch.testing.assert_close(weights, expected_weights)


def test_attention_refuses_the_masks_that_the_layer_refuses():
    """One that only happens to fit would hide one example's keys from the others; one of integers would be added."""
    layer, x = nn.MultiheadAttention(8, 2), torch.randn(6, 4, 8)  # six positions, four examples
    refused = {
        "key_padding_mask": [torch.zeros(6, 4, dtype=torch.bool), torch.zeros(4, 6, dtype=torch.long)],
        "attn_mask": [torch.zeros(1, 6), torch.zeros(6, 8, 6), torch.zeros(4, 2, 6, 6), torch.zeros(6, 6).long()],
        "is_causal": [True],
    }
    for name, values in refused.items():
        for value in values:
            with pytest.raises((AssertionError, RuntimeError)):
                layer(x, x, x, **{name: value})
            keeper = BookKeeper(layer, batch_first=False, loss_reduction="mean")
            with pytest.raises(ArgumentError, match=f"{name}=.*Use |{name}=.*Give "):
                layer(x, x, x, **{name: value})
            keeper.detach_from_model()


def test_attention_dropout_shows_in_the_weights_as_the_layer_shows_it():
    layer, x = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).double(), torch.randn(3, 5, 8).double()
    torch.manual_seed(1)
    expected, expected_weights = layer(x, x, x, average_attn_weights=False)
    keeper = BookKeeper(layer, batch_first=True, loss_reduction="mean")
    torch.manual_seed(1)
    out, weights = layer(x, x, x, average_attn_weights=False)
    keeper.detach_from_model()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, expected_weights)
