"""The rule of convolutions that have kernels, with a plain computation in the kernels' place: here for every CPU. The kernels
themselves are held to the same loop in test_conv_kernels.py (interpreted) and in tests/gpu."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

import plain_convs
from conv_cases import CASES, KINDS, check_against_the_loop, gradients, make, use_of
from dpivon.models import StandardisedConv2d, WideResNet
from dpivon.privacy.kernels import conv_ops
from dpivon.privacy.kernels.padded import _GROUP_NORM, PaddedGradients
from dpivon.privacy.kernels.reference import Batch, LoopedGradients
from dpivon.privacy.layers import uses
from dpivon.privacy.layers.convolved import Convolved
from dpivon.privacy.layers.norm import group_norm
from dpivon.privacy.layers.registry import rule_for
from dpivon.privacy.layers.uses import merge
from dpivon.stacked import AnyNetwork
from dpivon.variational.layers import SpreadConv2d

pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same.")


@pytest.fixture(autouse=True)
def switched_on():
    with conv_ops.kernels(on=True):
        yield


@pytest.fixture(scope="module", autouse=True)
def operators():
    plain_convs.register()


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch):
    monkeypatch.setattr(conv_ops, "device_takes", lambda device: True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_norms_and_sums_are_those_of_the_loop(case, kind):
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(check_against_the_loop(case, kind, 2e-5, dtype=dtype), Convolved)


def test_directions_in_bf16_never_make_a_norm_too_small():
    """Of gradients that lie along the weights by ever larger parts: what is taken away is at most what lies along them."""
    layer, x, g = make("1x1 shortcut", "standardised", examples=64)
    unit = layer.standardised().detach()[0].view(1, -1, 1, 1)
    x = (unit * torch.linspace(0, 3, 64).view(-1, 1, 1, 1) + 0.3 * x).bfloat16()
    g = g.masked_fill(torch.arange(16).view(1, -1, 1, 1) > 0, 0.0).bfloat16()
    exact, found = gradients(layer, x, g).flatten(1).norm(dim=1), use_of(layer, x, g).squared_norm().sqrt()
    assert (found >= exact).all()
    assert (found[:16] <= 1.002 * exact[:16]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_example_add_up_before_they_are_measured(kind):
    layer, x, g = make("3x3", kind, examples=6)
    exact = gradients(layer, x, g).unflatten(0, (3, 2)).sum(1)
    use = use_of(layer, x, g).grouped(2)
    assert isinstance(use, Convolved)
    torch.testing.assert_close(use.squared_norm().sqrt(), exact.flatten(1).norm(dim=1), rtol=2e-5, atol=0.0)
    torch.testing.assert_close(use.weighted_sum(torch.ones(3)), exact.sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_two_uses_of_one_weight_are_unfolded_and_merged_with_their_cross_terms(kind):
    layer, x, g = make("3x3 stride 2", kind, examples=6)
    exact = gradients(layer, x[:3], g[:3]) + gradients(layer, x[3:], g[3:])
    merged = merge([use_of(layer, x[:3], g[:3]), use_of(layer, x[3:], g[3:])])
    assert not isinstance(merged, Convolved)
    torch.testing.assert_close(merged.squared_norm().double().sqrt(), exact.flatten(1).norm(dim=1), rtol=1e-4, atol=0.0)


def test_a_gaussian_layer_keeps_its_rule(monkeypatch):
    """Its spread's gradients are scaled element by element, of which the kernels know nothing."""
    layer, x, g = SpreadConv2d(16, 32, 3, padding=1), *make("3x3", "plain")[1:]
    layer.initial_std = 0.1
    got = rule_for(layer)(layer, (x,), g)
    monkeypatch.setattr(conv_ops, "device_takes", lambda device: False)
    expected = rule_for(layer)(layer, (x,), g)
    for p, use in expected.items():
        assert type(got[p]) is type(use)
        torch.testing.assert_close(got[p].squared_norm(), use.squared_norm())


def test_a_gradient_along_the_weights_is_clipped_as_if_it_had_more_across():
    """What the pull-back leaves of it is mostly the rounding of what it takes away."""
    layer, x, g = make("1x1 shortcut", "standardised")
    unit = layer.standardised().detach()[0].view(1, -1, 1, 1)
    x = (unit + 1e-4 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))).contiguous()
    g[:, 1:] = 0.0
    exact, use = gradients(layer, x, g).flatten(1).norm(dim=1), use_of(layer, x, g)
    assert (use.squared_norm().sqrt() >= exact).all()


def test_what_a_standardised_layer_left_behind_does_not_follow_its_weights(monkeypatch):
    """A step adds up after the sampled weights are gone; in every form that a use may take."""
    for takes, cap in ((True, uses.MEMORY_CAP), (False, uses.MEMORY_CAP), (False, 0)):
        monkeypatch.setattr(conv_ops, "device_takes", lambda device, takes=takes: takes)
        monkeypatch.setattr(uses, "MEMORY_CAP", cap)
        layer, x, g = make("3x3", "standardised")
        exact, use = gradients(layer, x, g), use_of(layer, x, g)
        with torch.no_grad():
            layer.weight.add_(torch.randn(layer.weight.shape))
        torch.testing.assert_close(
            use.squared_norm().sqrt().double(), exact.flatten(1).norm(dim=1), rtol=1e-4, atol=0.0
        )
        torch.testing.assert_close(use.weighted_sum(torch.ones(4)).double(), exact.sum(0), rtol=1e-3, atol=1e-3)


def test_statistics_are_made_once():
    layer, x, g = make("3x3", "standardised")
    traced = make_fx(lambda x, g: _norm_and_sum(use_of(layer, x, g)))(x, g)
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.dpivon.conv_statistics.default) == 1
    assert called.count(torch.ops.dpivon.conv_sums.default) == 1


def _norm_and_sum(use):
    norms = use.squared_norm()
    return norms, use.without(~torch.isfinite(norms)).weighted_sum(1 / norms)


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("the switch", lambda layer, x, g: None),
        ("double", lambda layer, x, g: (layer.double(), x.double(), g.double())),
        ("few positions", lambda layer, x, g: (layer, x[..., :3, :3], g[..., :3, :3])),
        ("channels", lambda layer, x, g: (nn.Conv2d(16, 24, 3, padding=1), x, g[:, :24])),
        ("groups", lambda layer, x, g: (nn.Conv2d(16, 32, 3, padding=1, groups=2), x, g)),
        ("padding", lambda layer, x, g: (nn.Conv2d(16, 32, 3, padding=1, padding_mode="circular"), x, g)),
    ],
)
def test_other_convolutions_keep_their_rule(why, change):
    layer, x, g = make("3x3", "plain")
    with conv_ops.kernels(on=why != "the switch"):
        assert not isinstance(use_of(*(change(layer, x, g) or (layer, x, g))), Convolved)
    assert isinstance(use_of(layer, x, g), Convolved)


@pytest.mark.parametrize("unit", [None, torch.randn(144, 32)])
def test_operators_say_beforehand_what_they_return(unit):
    _, x, g = make("3x3 stride 2", "plain", examples=40)
    shape = [3, 3, 2, 2, 1, 1, 1, 1]
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.dpivon.conv_statistics, (x, g, unit, shape, 1), test_utils=checks)
    found = None if unit is None else torch.ops.dpivon.conv_statistics(x, g, unit, shape, 1)
    torch.library.opcheck(torch.ops.dpivon.conv_sums, (x, g, torch.rand(40), found, shape, 1), test_utils=checks)


def test_chunks_are_few_enough_examples_and_tiles_fit_the_weights():
    for examples in (1, 7, 256, 5000):
        for tiles in (1, 5, 72):
            assert 1 <= conv_ops.chunk_size(examples, tiles) <= 32
    for rows, out, positions in ((27, 16, 1024), (576, 64, 1024), (2304, 256, 64), (144, 80, 25), (128, 512, 65)):
        tile = conv_ops.tile_for(rows, out, positions, torch.bfloat16)
        assert 1 <= tile.span <= -(-rows // tile.bd)
        assert tile.bt >= 16
        assert tile.bd <= 64 >= tile.bo
        assert tile.warps == 4
        assert tile.flatten == (positions > tile.bt)
    rounds = {
        positions: conv_ops.tile_for(64, 64, positions, torch.bfloat16).bt for positions in (16, 64, 65, 197, 1024)
    }
    assert rounds == {16: 16, 64: 64, 65: 32, 197: 64, 1024: 64}


# ---- the whole program, as a GPU compiles and captures it


def batch_of(images, labels, spare=2):
    n = len(labels)
    places = torch.cat([torch.arange(n), torch.full((spare,), n)]).unsqueeze(0)
    return Batch(images, labels, torch.zeros(n), torch.tensor([0, n]), places, torch.arange(n))


class Viewing(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16 * 64, 10)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).view(len(x), -1))


class Tokens(nn.Module):
    """Normalised over positions twice, whose sums wait for each other."""

    def __init__(self):
        super().__init__()
        self.patches, self.first, self.last = nn.Conv2d(3, 16, 1), nn.LayerNorm(16), nn.LayerNorm(32)
        self.inner, self.head = nn.Linear(16, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = self.first(self.patches(x).flatten(2).mT)
        return self.head(self.last(self.inner(x)).square().mean(1))


NETWORKS = {
    "tokens": (Tokens, 1),
    "wide": (lambda: WideResNet(depth=10, width=1, groups=4), 5),
    "flat": (
        lambda: nn.Sequential(
            StandardisedConv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)
        ),
        1,
    ),
    "viewing": (Viewing, 1),
}


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_traced_program_with_kernels_gives_the_sums_of_the_loop(monkeypatch, name):
    build, least = NETWORKS[name]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(9, 3, *([16, 16] if name == "wide" else [8, 8]), generator=generator)
    labels = torch.randint(0, 10, (9,), generator=generator)
    images[4] = float("nan")
    network, bound = AnyNetwork(build), torch.tensor([0.5])
    theta, batch = network.initial(0).unsqueeze(0), batch_of(images, labels)
    with conv_ops.kernels(on=False):
        expected = LoopedGradients(network, torch.float32).clipped_sums(theta, batch, bound)
    traced, programs = PaddedGradients(network, torch.device("cpu"), torch.float32), []

    def compiled(program, device, *, again):
        assert again  # with kernels, and only with them
        programs.append(program)
        return program if name == "wide" else torch.compile(program, backend="aot_eager")

    monkeypatch.setattr("dpivon.privacy.kernels.padded.compiled", compiled)
    got = traced.clipped_sums(theta, batch, bound)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert traced.step.channels_last == (name != "viewing")  # such a network gets its images as they were
    graph = programs[0].graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    assert len(inputs) == len(traced.params) + 3  # none is cut out of the row, at a place that its kernels would know
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.dpivon.conv_sums.default) >= least
    if name == "tokens":  # the sums of the two normalisations, [rows, 64 positions / 8, 16 or 32], by one operator
        added = [n.args[0] for n in graph.nodes if n.target is torch.ops.dpivon.position_sums.default]
        partly = [sorted(tuple(g.meta["val"].shape) for g in each) for each in added]
        assert partly.count([(11, 8, 16)] * 2 + [(11, 8, 32)] * 2) == 1
    if name == "wide":  # nothing is unfolded, and after the images no activation is copied into another order
        assert torch.ops.aten.native_group_norm.default not in called
        made = [
            n.meta["val"].shape
            for n in graph.nodes
            if n.target in (torch.ops.aten.as_strided.default, torch.ops.aten.clone.default)
        ]
        assert all(len(shape) < 4 or shape[0] != 11 or shape[1] == 3 for shape in made)
        products = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
        read = [t.meta["val"] for n in graph.nodes if n.target in products for t in n.all_input_nodes]
        assert all(t.is_contiguous(memory_format=torch.channels_last) for t in read if t.dim() == 4)  # weights too


def test_a_recorded_normalisation_leaves_channels_last(monkeypatch):
    """Forward and backward, on a device that is no CPU: there torch's own gradient would put channels first, and every
    convolution before would copy it back."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which knows no such device
    x = torch.empty(3, 8, 4, 5, device="meta").to(memory_format=torch.channels_last)
    layer = nn.GroupNorm(2, 8, device="meta")

    def program(x, g):
        x = x.detach().requires_grad_()
        z = group_norm(layer, lambda z, uses: z, x)
        return z, torch.autograd.grad(z, x, g)[0]

    for g, copies in ((torch.empty_like(x), 0), (torch.empty(3, 8, 1, 1, device="meta").expand(x.shape), 1)):
        graph = make_fx(program, decomposition_table=get_decompositions(_GROUP_NORM))(x, g).graph
        made = [node.meta["val"] for node in graph.find_nodes(op="output")[0].args[0]]
        assert [t.stride() for t in made] == [x.stride()] * 2
        assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)) == copies


@pytest.mark.parametrize("affine", [True, False])
def test_a_recorded_normalisation_has_torchs_own_gradient(affine):
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(3, 8, 4, 5, generator=generator).to(memory_format=torch.channels_last) for _ in range(2))
    layer = nn.GroupNorm(2, 8, affine=affine)
    if affine:
        nn.init.normal_(layer.weight, generator=generator)

    def program(x, g):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(group_norm(layer, lambda z, uses: z, x), x, g)[0]

    alone = x.clone().requires_grad_()
    expected = torch.autograd.grad(layer(alone), alone, g)[0]
    recorded = make_fx(program, decomposition_table=get_decompositions(_GROUP_NORM))(x, g)
    torch.testing.assert_close(recorded(x, g), expected)
