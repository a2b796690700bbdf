"""Linear layers over several positions, which the kernels of convolutions take as convolutions of one tap; here with a plain
computation in the kernels' place, on a GPU in tests/gpu."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import plain_convs
from dpivon.models import TextEncoder, VisionTransformer
from dpivon.privacy.gradients.side_by_side import in_blocks, squared_norms
from dpivon.privacy.kernels import conv_ops
from dpivon.privacy.kernels.padded import PaddedGradients
from dpivon.privacy.kernels.reference import Batch, LoopedGradients
from dpivon.privacy.layers import bounded, convolved, uses
from dpivon.privacy.layers.convolved import ByGrams, Convolved, Summed, projected
from dpivon.privacy.layers.linear import hugging_face_conv1d
from dpivon.privacy.layers.registry import rule_for
from dpivon.privacy.layers.uses import Dense, Outer, merge
from dpivon.stacked import AnyNetwork
from dpivon.variational.layers import SpreadLinear


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    plain_convs.register()
    monkeypatch.setattr(conv_ops, "device_takes", lambda device: True)
    monkeypatch.setattr(convolved, "_in_eager_bf16", lambda g: False)  # as while a program is recorded
    with conv_ops.kernels(on=True):
        yield


def operands(examples=5, positions=17, d=16, p=48, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    a, g = (torch.randn(examples, positions, n, generator=generator).to(dtype) for n in (d, p))
    return a, g


def exact(a, g, transposed=False):
    gradients = g.double().mT @ a.double()
    return gradients.mT if transposed else gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_norms_and_sums_are_those_of_the_definition_and_a_dropped_example_counts_for_nothing(transposed, dtype):
    a, g = operands(dtype=dtype)
    each = exact(a, g, transposed)
    a[2, 3, 1], g[2, 5, 7] = float("nan"), float("inf")
    use = projected(a, g, each.shape[1:], transposed)
    assert isinstance(use, Convolved)
    norms, kept = use.squared_norm().sqrt(), torch.arange(5) != 2
    assert not torch.isfinite(norms[2])
    torch.testing.assert_close(norms[kept], each.flatten(1).norm(dim=1)[kept], rtol=1e-6, atol=0.0)
    c = torch.rand(5, dtype=torch.float64) * kept
    total = use.without(~kept).weighted_sum(c)
    assert total.dtype == torch.float64
    torch.testing.assert_close(total, (each[kept] * c[kept].view(-1, 1, 1)).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3])  # of three rows gradients are made: Gram matrices would take more
@pytest.mark.parametrize("like", ["ordinary", "cancelling"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_recorded_program_bounds_norms_of_large_layers_and_no_example_counts_for_more(
    monkeypatch, transposed, like, rows
):
    """By one operator for all layers, also of several rows an example; sums are the kernels'."""
    monkeypatch.setattr(bounded, "_WIDE", 0)
    layers = [operands(examples=6, positions=16, d=d, p=p, dtype=torch.bfloat16) for d, p in ((64, 112), (112, 64))]
    if like == "cancelling":
        for a, g in layers:
            a[:, 8:], g[:, 8:] = a[:, :8], -g[:, :8]
            g[:, 0] *= 1.02
    exactly = [exact(a, g, transposed) for a, g in layers]

    def program(c):
        found = [projected(a, g, each.shape[1:], transposed) for (a, g), each in zip(layers, exactly, strict=True)]
        kinds.append([type(use) for use in found])
        found = [use.grouped(rows) for use in found]
        return squared_norms(found), [use.weighted_sum(c) for use in found]

    kinds, c = [], torch.linspace(0.1, 1, 6 // rows, dtype=torch.float64)
    recorded = make_fx(program)(c)
    program(c)
    assert kinds == [[ByGrams] * 2, [Convolved] * 2]
    called = [node.target for node in recorded.graph.nodes]
    assert called.count(torch.ops.dpivon.gram_bounds.default) == 1
    assert called.count(torch.ops.dpivon.conv_sums.default) == 2
    assert torch.ops.dpivon.conv_statistics.default not in called
    for i, (each, square, total) in enumerate(zip(exactly, *recorded(c), strict=True)):
        each = each.unflatten(0, (-1, rows)).sum(1)
        norms, true = square.sqrt(), each.flatten(1).norm(dim=1)
        assert (norms >= true).all()
        if like == "ordinary":
            assert (norms <= 1.001 * true).all()
        torch.testing.assert_close(total, (each * c.view(-1, 1, 1)).sum(0), rtol=1e-5, atol=1e-5)
        for alone in torch.eye(len(c), dtype=torch.float64):
            assert float(recorded(alone / norms)[1][i].norm()) <= 1 + 1e-6


def bounds(a, g, rows=1):
    shape = torch.Size((g.shape[2], a.shape[2]))
    return ByGrams(a.mT.unsqueeze(3), g.mT.unsqueeze(3), convolved._ONE_TAP, shape, None).grouped(rows)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf, 3e38])
def test_a_bad_example_has_no_bound_and_changes_no_other_one(bad, rows):
    """Also where what is not finite meets an output gradient of zero."""
    a, g = operands(examples=6, positions=16, d=64, p=112, dtype=torch.bfloat16)
    each, whole = exact(a, g).unflatten(0, (-1, rows)).sum(1), bounds(a, g, rows).squared_norm()
    a[1, 3, 5], g[1, 3] = bad, 0.0
    kept = torch.arange(len(each)) != 1 // rows
    use = bounds(a, g, rows)
    norms = use.squared_norm()
    assert torch.equal(norms.isfinite(), kept)
    assert torch.equal(norms[kept], whole[kept])
    use = use.without(~kept)
    assert isinstance(use, ByGrams)
    torch.testing.assert_close(use.weighted_sum(kept.double()), each[kept].sum(0), rtol=1e-5, atol=1e-5)


def test_bounds_are_the_same_however_operands_lie():
    a, g = operands(examples=1, positions=16, d=64, p=112, dtype=torch.bfloat16)
    same = [t.expand(6, -1, -1) for t in (a, g)]
    apart = [torch.cat([t, t], 2)[:, :, : t.shape[2]] for t in same]
    for rows in (1, 2, 3):
        expected = bounds(*(t.contiguous() for t in same), rows).squared_norm()
        for given in (same, apart):
            torch.testing.assert_close(bounds(*given, rows).squared_norm(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_program_of_position_sums_has_a_size_that_kernels_can_have(dtype):
    for n in (1, 7, 256, 3000):
        for lines in (2, 8, 128):
            for p in (1, 15, 64, 2305, 300_001, 2**22):
                g = torch.empty(1, dtype=dtype).expand(n, lines, p)
                across = conv_ops.columns_at_once(g, lines)
                least = 128 // g.element_size()
                assert across % least == 0
                assert (across & (across - 1), lines * across * g.element_size() <= 16384) == (0, True)
                assert across == least or n * -(-p // across) >= 4 * conv_ops._PROGRAMS


class Conv1D(nn.Module):
    """Hugging Face's, as far as its rule reads it."""

    def __init__(self, d, p):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(d, p)), nn.Parameter(torch.randn(p))


@pytest.mark.parametrize(
    ("layer", "rule"), [(nn.Linear(16, 48), rule_for(nn.Linear(1, 1))), (Conv1D(16, 48), hugging_face_conv1d)]
)
def test_rules_of_linear_layers_take_the_kernels(layer, rule):
    a, g = operands()
    use = rule(layer, (a,), g)[layer.weight]
    assert isinstance(use, Convolved)
    total = exact(a, g, transposed=layer.weight.shape == (16, 48)).sum(0)
    torch.testing.assert_close(use.weighted_sum(torch.ones(5)), total, rtol=1e-5, atol=1e-5)


def test_kernels_are_taken_where_they_read_less(monkeypatch):
    def kind(**options):
        a, g = operands(**options)
        return type(projected(a, g, torch.Size((g.shape[2], a.shape[2]))))

    assert kind() is Convolved
    assert kind(positions=1) is Outer  # its norm is free
    assert kind(p=40) is Dense  # not made for the kernels
    assert kind(dtype=torch.float64) is Dense
    assert kind(positions=256, d=16, p=16) is Dense  # the gradient is smaller than what it is made of
    assert kind(positions=256, d=256, p=256) is Convolved
    assert kind(positions=257, d=256, p=256) is Dense  # to make it twice takes longer than to keep it
    monkeypatch.setattr(uses, "MEMORY_CAP", 0)
    assert kind(positions=257, d=256, p=256) is Convolved  # which cannot be kept
    with conv_ops.kernels(on=False):
        assert kind() is Outer


def test_a_bias_waits_for_the_others_while_a_program_is_recorded():
    """One matrix of all of them, whoever is dropped; a layer without kernels, and a step that is not recorded, make theirs."""
    layers = [nn.Linear(16, 48), nn.Linear(16, 32), nn.Linear(16, 40)]
    operands_of = [operands(p=layer.out_features) for layer in layers]
    for _, g in operands_of:
        g[2, 3] = float("nan")
    params = [layer.bias for layer in layers]

    def program(c):
        found = [rule_for(f)(f, (a,), g)[f.bias] for f, (a, g) in zip(layers, operands_of, strict=True)]
        blocks = in_blocks(params, found, joint=True)
        kinds.append([type(use) for use in found])
        return [(use.squared_norm(), use.weighted_sum(c)) for _, use in blocks]

    kinds, c = [], torch.tensor([0.5, 1.0, 0.0, 0.2, 1.0])
    recorded, made = make_fx(program)(c), program(c)
    assert kinds == [[Summed, Summed, Dense], [Dense] * 3]
    called = [node.target for node in recorded.graph.nodes]
    assert called.count(torch.ops.dpivon.position_sums.default) == 1
    (norms, total), (alone, last) = recorded(c)
    kept = c > 0
    exact = torch.cat([g.double().sum(1) for _, g in operands_of], 1)[kept]
    torch.testing.assert_close((norms + alone)[kept], exact.square().sum(1), rtol=1e-5, atol=0.0)
    sums = (exact * c[kept].unsqueeze(1)).sum(0)
    torch.testing.assert_close(torch.cat([total, last]), sums, rtol=1e-5, atol=1e-5)
    assert not norms[2].isfinite()
    assert len(made) == 1
    torch.testing.assert_close(made[0][0][kept], exact.square().sum(1), rtol=1e-5, atol=0.0)


def test_a_bias_that_waits_is_an_ordinary_use():
    """Clipped by itself, of several rows an example, used twice."""
    _, g = operands(examples=6)
    use, made = Summed(g), Dense(g.sum(1))
    twice = [merge([of, of]) for of in (use, made)]
    pairs = ((use, made), (use.grouped(2), made.grouped(2)), twice)
    for got, expected in pairs:
        c = torch.rand(len(expected.g))
        torch.testing.assert_close(got.squared_norm(), expected.squared_norm(), rtol=1e-5, atol=0.0)
        torch.testing.assert_close(got.weighted_sum(c), expected.weighted_sum(c), rtol=1e-5, atol=1e-5)
    dropped = torch.arange(6) == 1
    torch.testing.assert_close(use.without(dropped).materialise(), made.without(dropped).materialise())


def test_an_operator_says_beforehand_what_it_returns():
    gs = [operands(p=p)[1] for p in (16, 48)]
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    for double in (False, True):
        torch.library.opcheck(torch.ops.dpivon.position_sums, (gs, double), test_utils=checks)
    images = [[t.mT.unsqueeze(3) for t in operands(p=p, dtype=torch.bfloat16)] for p in (16, 48)]
    torch.library.opcheck(torch.ops.dpivon.gram_bounds, tuple(zip(*images, strict=True)), test_utils=checks)


def test_two_uses_of_one_weight_are_merged_with_their_cross_terms():
    a, g = operands(examples=6)
    shape = torch.Size((48, 16))
    merged = merge([projected(a[:3], g[:3], shape), projected(a[3:], g[3:], shape)])
    each = exact(a[:3], g[:3]) + exact(a[3:], g[3:])
    torch.testing.assert_close(merged.squared_norm().double().sqrt(), each.flatten(1).norm(dim=1), rtol=1e-5, atol=0.0)


def test_rows_of_one_example_add_up_before_they_are_measured():
    a, g = operands(examples=6)
    use = projected(a, g, torch.Size((48, 16))).grouped(2)
    each = exact(a, g).unflatten(0, (3, 2)).sum(1)
    torch.testing.assert_close(use.squared_norm().sqrt(), each.flatten(1).norm(dim=1), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(use.weighted_sum(torch.ones(3)), each.sum(0), rtol=1e-5, atol=1e-5)


def test_a_gaussian_layer_keeps_its_rule():
    """Its spread's gradients are scaled element by element, of which the kernels know nothing."""
    layer = SpreadLinear(16, 48)
    layer.initial_std = 0.1
    a, g = operands()
    got = rule_for(layer)(layer, (a,), g)
    with conv_ops.kernels(on=False):
        expected = rule_for(layer)(layer, (a,), g)
    for p, use in expected.items():
        assert type(got[p]) is type(use)
        torch.testing.assert_close(got[p].squared_norm(), use.squared_norm())


# ---- whole networks, as a GPU compiles and captures them


def text():
    return TextEncoder(vocabulary=30, length=20, width=16, heads=2, depth=2)


def vision():
    return VisionTransformer(image_size=20, patch=4, width=32, heads=2, depth=1)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize(("build", "weights", "others"), [(text, 8, 2), (vision, 5, 1)])
def test_the_traced_program_of_a_transformer_gives_the_sums_of_the_loop(monkeypatch, build, weights, others):
    """With spare rows and, where inputs can be, a non-finite example; no example's weight gradient is made."""
    generator = torch.Generator().manual_seed(0)
    if build is text:
        inputs = torch.randint(0, 30, (9, 20), generator=generator)
    else:
        inputs = torch.randn(9, 3, 20, 20, generator=generator)
        inputs[4] = float("nan")
    labels = torch.randint(0, 4, (9,), generator=generator)
    places = torch.cat([torch.arange(9), torch.full((2,), 9)]).unsqueeze(0)
    batch = Batch(inputs, labels, torch.zeros(9), torch.tensor([0, 9]), places, torch.arange(9))
    network, bound, programs = AnyNetwork(build), torch.tensor([0.5]), []
    theta = network.initial(0).unsqueeze(0)
    with conv_ops.kernels(on=False):
        expected = LoopedGradients(network, torch.float32).clipped_sums(theta, batch, bound)
    traced = PaddedGradients(network, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(
        "dpivon.privacy.kernels.padded.compiled", lambda program, device, **how: programs.append(program) or program
    )
    torch.testing.assert_close(traced.clipped_sums(theta, batch, bound), expected, rtol=1e-4, atol=1e-6)
    nodes = [node for node in programs[0].graph.nodes if node.op == "call_function"]
    called = [node.target for node in nodes]
    assert called.count(torch.ops.dpivon.conv_statistics.default) == weights
    assert called.count(torch.ops.dpivon.conv_sums.default) == weights
    # Their chunks, all biases at once, and all long normalisations at once.
    assert called.count(torch.ops.dpivon.position_sums.default) == weights + others
    made = {tuple(p.shape) for p in network.template().parameters() if p.numel() >= 256 and p.dim() == 2}
    values = [(n.target, n.meta.get("val")) for n in nodes if n.target is not torch.ops.dpivon.conv_sums.default]
    shapes = [(target, tuple(v.shape)) for target, v in values if isinstance(v, torch.Tensor)]
    assert not [target for target, shape in shapes if shape[:1] == (11,) and shape[1:] in made]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_example_moves_the_traced_sum_of_a_transformer_by_more_than_c(dtype):
    """Coherent examples of which one is taken away: the very tensor that gets the noise, with every gradient materialised."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, 3, 20, 20, generator=generator) + 0.01 * torch.randn(130, 3, 20, 20, generator=generator)
    labels, network, bound = torch.zeros(130, dtype=torch.int64), AnyNetwork(vision), torch.tensor([0.1])
    theta = network.initial(0).unsqueeze(0)
    with conv_ops.kernels(on=False):
        program = PaddedGradients(network, torch.device("cpu"), dtype)

        def total(places):
            places = torch.cat([places, torch.full((131 - len(places),), 130)]).unsqueeze(0)
            batch = Batch(images, labels, torch.zeros(130), torch.tensor([0, 130]), places, torch.arange(130))
            return program.clipped_sums(theta, batch, bound)

        everyone = torch.arange(130)
        whole = total(everyone)
        for gone in (0, 64, 129):
            moved = float((whole - total(everyone[everyone != gone])).norm())
            assert 0.05 < moved <= 0.1 * (1 + 1e-5), gone
