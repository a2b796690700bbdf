"""Book-keeping gradients against a loop over examples: every layer rule, shape and option."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.layers import DPLSTM
from per_example_loop import book, both_precisions, loop, loss_of, small_cnn
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpivon import PrivacyError
from dpivon.privacy.clipping import FlatClipping, PerLayerClipping, clipped_sum
from dpivon.privacy.gradients.bookkeeping import BookKeeper, has_rules
from dpivon.privacy.layers import Dense, Outer, register_rule

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:Using padding=.same.")


@given(
    leading=st.lists(st.integers(1, 4), max_size=2),
    size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    bias=st.booleans(),
    batch=st.integers(1, 5),
)
@settings(max_examples=25, deadline=None)
def test_linear_with_any_leading_dimensions(leading, size, bias, batch):
    torch.manual_seed(0)
    both_precisions(nn.Sequential(nn.Linear(*size, bias=bias)), torch.randn(batch, *leading, size[0]))


@given(
    dims=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.sampled_from([0, 1, 2, "same", "valid"]),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    bias=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_convolutions_with_every_option(dims, kernel, stride, padding, dilation, groups, mode, bias):
    if padding == "same":
        stride = 1
    if dims == 3 and mode == "reflect":
        mode = "zeros"
    torch.manual_seed(0)
    layer = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1](
        4, 6, kernel, stride, padding, dilation, groups=groups, bias=bias, padding_mode=mode
    )
    both_precisions(nn.Sequential(layer), torch.randn(3, 4, *(7, 6, 5)[:dims]))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.GroupNorm(2, 6), (6,)),
        (nn.GroupNorm(3, 6), (6, 4)),
        (nn.GroupNorm(1, 6), (6, 3, 4)),
        (nn.GroupNorm(6, 6), (6, 2, 3, 4)),
        (nn.LayerNorm(5), (5,)),
        (nn.LayerNorm(5), (4, 5)),
        (nn.LayerNorm((4, 5)), (2, 4, 5)),
        (nn.LayerNorm(5, bias=False), (3, 5)),
        (nn.InstanceNorm1d(6, affine=True), (6, 8)),
        (nn.InstanceNorm2d(6, affine=True), (6, 4, 4)),
        (nn.InstanceNorm3d(6, affine=True), (6, 3, 3, 2)),
        (nn.RMSNorm(5), (4, 5)),
        (nn.RMSNorm((4, 5)), (3, 4, 5)),
    ],
    ids=str,
)
def test_normalisation_layers(layer, shape):
    torch.manual_seed(0)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_()
    both_precisions(nn.Sequential(layer), torch.randn(4, *shape) * 2 + 1)


@pytest.mark.parametrize("padding_idx", [None, 0])
def test_embedding_with_repeated_and_padding_indices(padding_idx):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=padding_idx), nn.Flatten(), nn.Linear(18, 4))
    both_precisions(model, torch.randint(0, 5, (6, 6)))


class Tied(nn.Module):
    """One linear layer used twice, and an embedding that is also the output layer."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 9, bias=False)  # declared before the body
        self.embed = nn.Embedding(9, 6)
        self.body = nn.Linear(6, 6)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = torch.tanh(self.body(self.embed(x)))
        return self.head(self.body(h))


def test_shared_weights_get_their_cross_terms():
    torch.manual_seed(0)
    both_precisions(Tied(), torch.randint(0, 9, (5, 4)))


class Encoder(nn.Module):
    """A stock transformer encoder with a bare positional parameter and a class token."""

    def __init__(self, batch_first=True):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.position = nn.Parameter(torch.randn(1, 6, 8))
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.head = nn.Linear(8, 3)
        self.batch_first = batch_first

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        x = self.encoder(x) if self.batch_first else self.encoder(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x[:, 0])


def test_transformer_encoder_with_bare_parameters():
    torch.manual_seed(0)
    both_precisions(Encoder(), torch.randn(4, 5, 8))


def test_a_batch_that_is_moved_to_another_dimension_inside_is_an_error():
    model = Encoder(batch_first=False)
    BookKeeper(model, batch_first=True, loss_reduction="mean")
    with pytest.raises(PrivacyError, match="rows"):
        model(torch.randn(4, 5, 8)).sum().backward()


def test_batch_second_throughout():
    class TimeMajor(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
            self.attention = nn.MultiheadAttention(6, 2)

        def forward(self, x):  # [T, B, 4]
            h = torch.tanh(self.inside(x))
            return self.head(self.attention(h, h, h)[0])

    torch.manual_seed(0)
    model, weight = TimeMajor().double(), torch.randn(8192, dtype=torch.float64)
    x = torch.randn(5, 4, 4, dtype=torch.float64)[:, :3]  # five steps of three examples
    params = list(model.parameters())
    rows = [
        torch.autograd.grad(loss_of(model(x[:, i : i + 1]).transpose(0, 1), weight).sum(), params) for i in range(3)
    ]
    expected = clipped_sum([torch.stack(column) for column in zip(*rows, strict=True)], FlatClipping(0.5))
    keeper = BookKeeper(model, batch_first=False, loss_reduction="mean")
    loss_of(model(x).transpose(0, 1), weight).mean().backward()
    for e, g in zip(expected, keeper.clipped_sums(params, FlatClipping(0.5)), strict=True):
        torch.testing.assert_close(e, g)


class Conv1D(nn.Module):
    """Hugging Face's Conv1D, as its source writes it."""

    def __init__(self, out, into):
        super().__init__()
        self.nf = out
        self.weight = nn.Parameter(torch.randn(into, out))
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).reshape(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"


def test_hugging_face_conv1d():
    torch.manual_seed(0)
    both_precisions(nn.Sequential(Conv1D(5, 4), nn.Tanh(), Conv1D(3, 5)), torch.randn(3, 6, 4))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_convolutional_network(reduction, channels_last):
    torch.manual_seed(0)
    model = small_cnn()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    both_precisions(model, torch.randn(5, 3, 8, 8), reduction=reduction, channels_last=channels_last)


def test_frozen_layers_and_frozen_parameters_are_left_out():
    torch.manual_seed(0)
    model = small_cnn()
    model[0].requires_grad_(False)
    model[4].weight.requires_grad_(False)
    both_precisions(model, torch.randn(5, 3, 8, 8))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


def test_an_unused_layer_contributes_zero():
    torch.manual_seed(0)
    both_precisions(Branches(), torch.randn(5, 4))


def test_activation_checkpointing():
    class Checkpointed(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.first, self.block = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
            self.reentrant = reentrant

        def forward(self, x):
            return checkpoint(self.block, torch.tanh(self.first(x)), use_reentrant=self.reentrant)

    for reentrant in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(reentrant)
        weight = torch.randn(8192, dtype=torch.float64)
        x = torch.randn(5, 4, dtype=torch.float64)
        model.double()
        plain = nn.Sequential(model.first, nn.Tanh(), *model.block)
        expected = loop(plain, x, weight, FlatClipping(0.5))
        got = book(model, x, weight, FlatClipping(0.5))
        for e, g in zip(expected, got, strict=True):
            torch.testing.assert_close(e, g)


def test_a_layer_without_a_rule_falls_back_to_opacus_for_that_layer_alone():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(6))

        def forward(self, x):
            return x * self.scale

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Scale(), nn.Linear(6, 3))
    assert not has_rules(model)
    both_precisions(model, torch.randn(5, 4))


def test_a_rule_of_ones_own():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.randn(6))

        def forward(self, x):
            return x + self.shift

    @register_rule(Shift)
    def shift(layer, inputs, g):
        return {layer.shift: Dense(g)}

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Shift())
    assert has_rules(model)
    both_precisions(model, torch.randn(5, 4))


def test_recurrent_layers_through_opacus_cells():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = DPLSTM(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    torch.manual_seed(0)
    both_precisions(Recurrent(), torch.randn(4, 5, 3))


def test_per_layer_clipping():
    torch.manual_seed(0)
    model, x = small_cnn().double(), torch.randn(5, 3, 8, 8, dtype=torch.float64)
    weight = torch.randn(8192, dtype=torch.float64)
    clipping = PerLayerClipping(tuple(0.1 * (i + 1) for i in range(len(list(model.parameters())))))
    for e, g in zip(loop(model, x, weight, clipping), book(model, x, weight, clipping), strict=True):
        torch.testing.assert_close(e, g)


@pytest.mark.parametrize("bad_value", [math.nan, math.inf])
def test_a_non_finite_example_contributes_zero(bad_value):
    torch.manual_seed(0)
    model, x = small_cnn().double(), torch.randn(6, 3, 8, 8, dtype=torch.float64)
    weight = torch.randn(8192, dtype=torch.float64)
    others = torch.tensor([0, 1, 3, 4, 5])
    expected = loop(model, x[others], weight, FlatClipping(0.3))
    x[2, 1, 3, 3] = bad_value
    for e, g in zip(expected, book(model, x, weight, FlatClipping(0.3)), strict=True):
        torch.testing.assert_close(e, g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 30.0, 300.0])
def test_no_example_moves_the_sum_by_more_than_c_whatever_the_offset_of_its_activations(dtype, offset):
    """Ghost norms cancel and bf16 sums round; the tensor that gets the noise must not care."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 4)
    )
    model = model.to(dtype)
    x = (torch.randn(1, 2, 6, 6).expand(513, -1, -1, -1) + 0.01 * torch.randn(513, 2, 6, 6) + offset).to(dtype)
    weight, c = torch.randn(8192).to(dtype), 1.0
    whole = book(model, x, weight * 50, FlatClipping(c))
    assert all(s.dtype == torch.float64 for s in whole)
    for gone in (0, 256, 512):
        kept = torch.arange(513) != gone
        less = book(model, x[kept], weight * 50, FlatClipping(c))
        moved = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(whole, less, strict=True)))
        assert moved <= c * (1 + 1e-5)
        assert moved > 0.5 * c  # the bound is in force


def test_ghost_norms_are_never_too_small_under_a_shared_offset():
    """With a shared offset and output gradients that cancel, an fp32 Gram product loses the norm."""
    torch.manual_seed(0)
    a = torch.randn(8, 16, 400) + 1000
    g = torch.randn(8, 16, 300)
    g -= g.mean(1, keepdim=True)
    exact = (g.double().mT @ a.double()).square().sum((1, 2))
    naive = ((a @ a.mT) * (g @ g.mT)).sum((1, 2))
    ours = Outer(a, g, torch.Size((300, 400))).squared_norm()
    assert (naive / exact - 1).abs().max() > 1e-2  # the trap is real
    torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=0)


def test_bf16_autocast_agrees_with_the_loop_under_autocast():
    torch.manual_seed(0)
    model, x, weight = small_cnn(), torch.randn(5, 3, 8, 8), torch.randn(8192)

    class Autocast(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x).float()

    expected = loop(Autocast(model), x, weight, FlatClipping(0.5))
    got = book(Autocast(model), x, weight, FlatClipping(0.5))
    assert all(g.dtype == torch.float64 for g in got)
    difference = torch.cat([(a - b).flatten() for a, b in zip(got, expected, strict=True)]).norm()
    assert float(difference) < 0.02 * float(torch.cat([e.flatten() for e in expected]).norm())


def test_several_theta_samples_and_augmentations_are_averaged_per_example_before_clipping():
    torch.manual_seed(0)
    model, weight = small_cnn().double(), torch.randn(8192, dtype=torch.float64)
    params = list(model.parameters())
    x = torch.randn(4, 3, 3, 8, 8, dtype=torch.float64)  # four examples of three augmentations
    rows = []
    for example in x:
        losses = loss_of(model(example), weight)
        rows.append(torch.autograd.grad(losses.mean(), params))
    expected = clipped_sum([torch.stack(column) for column in zip(*rows, strict=True)], FlatClipping(0.3))
    got = book(model, x.flatten(0, 1), weight, FlatClipping(0.3), augmentations=3)
    for e, g in zip(expected, got, strict=True):
        torch.testing.assert_close(e, g)

    keeper = BookKeeper(model, batch_first=True, loss_reduction="mean", samples=3)
    for k in range(3):  # the same through three passes, as θ-samples make them
        keeper.between_samples()
        loss_of(model(x[:, k]), weight).mean().backward()
        keeper.between_samples()
    for e, g in zip(expected, keeper.clipped_sums(params, FlatClipping(0.3)), strict=True):
        torch.testing.assert_close(e, g)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_gives_the_same_sums():
    torch.manual_seed(0)
    model, x, weight = small_cnn(), torch.randn(5, 3, 8, 8), torch.randn(8192)
    expected = book(model, x, weight, FlatClipping(0.5))
    params = list(model.parameters())
    keeper = BookKeeper(model, batch_first=True, loss_reduction="mean")
    loss_of(torch.compile(model)(x), weight).mean().backward()
    for e, g in zip(expected, keeper.clipped_sums(params, FlatClipping(0.5)), strict=True):
        torch.testing.assert_close(e, g, rtol=1e-4, atol=1e-6)
