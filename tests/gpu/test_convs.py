"""The kernels of convolutions on a GPU: against the loop in double, against the guarantee, and in a captured step. Skipped
where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from conv_cases import CASES, KINDS, check_against_the_loop, gradients, make, slack, use_of

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: run `pytest tests/gpu` on a machine with one", allow_module_level=True)

from dpivon.models import StandardisedConv2d, VisionTransformer, WideResNet
from dpivon.privacy.kernels import conv_ops
from dpivon.privacy.kernels.reference import Batch, LoopedGradients
from dpivon.privacy.kernels.replay import Replay
from dpivon.privacy.layers import convolved
from dpivon.privacy.layers.convolved import Convolved, projected
from dpivon.stacked import AnyNetwork, Run, Stack

DEVICE = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float32]
pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same.")


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setattr(convolved, "_in_eager_bf16", lambda g: False)  # as while a program is recorded
    with conv_ops.kernels(on=True):
        yield


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.bfloat16) for case in CASES),
        *((c, torch.float32) for c in ("3x3 stride 2", "first layer", "odd channels")),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_sums_are_those_of_the_loop(case, kind, dtype):
    """Of the very operands, so that bf16 is no excuse: only accumulators are rounded. An example that holds NaN is dropped."""
    assert isinstance(check_against_the_loop(case, kind, 2e-5, dtype=dtype, device=DEVICE), Convolved)


@pytest.mark.parametrize(("into", "out", "side", "stride"), [(64, 64, 32, 1), (64, 128, 32, 2), (256, 256, 8, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_layers_of_a_wide_residual_network(kind, into, out, side, stride):
    """Tiles as large as they get, many chunks; and twice the same to the bit."""
    CASES["large"] = (into, out, side, {"kernel_size": 3, "padding": 1, "stride": stride})
    try:
        check_against_the_loop("large", kind, 3e-5, examples=70, dtype=torch.bfloat16, device=DEVICE)
        layer, x, g = make("large", kind, examples=70, dtype=torch.bfloat16, device=DEVICE)
    finally:
        del CASES["large"]
    c = torch.rand(70, device=DEVICE)
    first, second = use_of(layer, x, g), use_of(layer, x, g)
    assert torch.equal(first.squared_norm(), second.squared_norm())
    assert torch.equal(first.weighted_sum(c), second.weighted_sum(c))


@pytest.mark.parametrize(("into", "out", "side", "stride"), [(64, 64, 32, 1), (64, 128, 32, 2), (128, 128, 16, 1)])
def test_one_loop_over_examples_and_positions_sums_to_the_bit_what_two_do(into, out, side, stride):
    """The statistics take two: what one loop adds up must be made of the very gradients that were measured."""
    shape, after = conv_ops.Geometry((3, 3), (stride, stride), (1, 1), (1, 1)), side // stride
    x, g = (
        torch.randn(70, n, s, s, device=DEVICE, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        for n, s in ((into, side), (out, after))
    )
    tile, c = conv_ops._tile(x, g, shape), torch.rand(70, device=DEVICE)
    assert tile.flatten
    found = conv_ops.statistics(x, g, torch.randn(9 * into, out, device=DEVICE), shape, 1)
    for means in (None, found):
        one, two = (conv_ops.sums(x, g, c, means, shape, 1, replace(tile, flatten=flat)) for flat in (True, False))
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["3x3 stride 2", "5x5 unpadded"])
def test_what_is_summed_is_what_was_measured(case, kind, dtype):
    """Activations with an offset: a gradient is nearly all mean, which the pull-back takes away. One example at a time, the sum
    is that example, and its norm the one that was measured."""
    layer, x, g = make(case, kind, examples=5, dtype=dtype, device=DEVICE, offset=30.0)
    use = use_of(layer, x, g)
    for i, squared in enumerate(use.squared_norm()):
        c = torch.zeros(5, device=DEVICE)
        c[i] = 0.7
        ratio = float(use.weighted_sum(c).norm() / (0.7 * squared.sqrt()))
        assert 1 - 2e-5 - slack(kind, dtype) < ratio <= 1 + 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_example_add_up_before_they_are_measured(kind):
    layer, x, g = make("3x3 stride 2", kind, examples=6, dtype=torch.bfloat16, device=DEVICE)
    exact = gradients(layer, x, g).unflatten(0, (3, 2)).sum(1)
    use = use_of(layer, x, g).grouped(2)
    norms, rtol = exact.flatten(1).norm(dim=1), 2e-5 + slack(kind, torch.bfloat16)
    assert (use.squared_norm().sqrt() > (1 - 2e-5) * norms).all()
    torch.testing.assert_close(use.squared_norm().sqrt(), norms, rtol=rtol, atol=0.0)
    torch.testing.assert_close(use.weighted_sum(torch.ones(3, device=DEVICE)), exact.sum(0), rtol=1e-3, atol=1e-4)


def test_operators_say_beforehand_what_they_return():
    _, x, g = make("3x3", "plain", examples=40, dtype=torch.bfloat16, device=DEVICE)
    shape, unit = [3, 3, 1, 1, 1, 1, 1, 1], torch.randn(144, 32, device=DEVICE)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.dpivon.conv_statistics, (x, g, unit, shape, 1), test_utils=checks)
    found = torch.ops.dpivon.conv_statistics(x, g, unit, shape, 1)
    c = torch.rand(40, device=DEVICE)
    torch.library.opcheck(torch.ops.dpivon.conv_sums, (x, g, c, found, shape, 1), test_utils=checks)


def test_sums_over_positions_are_those_of_the_definition():
    """Of gradients in bf16 and fp32, any strides, and of chunks in double; NaN stays in its row; twice the same to the bit."""
    for dtype, double, tolerance in (
        (torch.bfloat16, False, 1e-5),
        (torch.float32, False, 1e-5),
        (torch.float32, True, 1e-12),
    ):
        shapes = ((70, 64, 512), (70, 65, 128), (70, 1, 48), (70, 300, 40))
        gs = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
        gs[1] = gs[1].transpose(0, 1).contiguous().transpose(0, 1)
        gs[0][3, 2, 1] = float("nan")
        got, again = (torch.ops.dpivon.position_sums(gs, double) for _ in range(2))
        exact = torch.cat([g.double().sum(1) for g in gs], 1)
        assert got.dtype == (torch.float64 if double else torch.float32)
        assert got.isnan().nonzero().tolist() == [[3, 1]]
        torch.testing.assert_close(got.nan_to_num().double(), exact.nan_to_num(), rtol=0.0, atol=20 * tolerance)
        assert torch.equal(got.nan_to_num(), again.nan_to_num())
    for chunks in (1, 2, 5):  # of a large weight, of which a program adds up many columns
        made = torch.randn(1, chunks, 300_001, device=DEVICE)
        assert conv_ops.columns_at_once(made, 8) > 32
        exact = made.double().sum(1)
        torch.testing.assert_close(torch.ops.dpivon.position_sums([made], True), exact, rtol=0.0, atol=1e-14)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.dpivon.position_sums, (gs[1:], False), test_utils=checks)


# ---- linear layers over several positions: convolutions of one tap


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("positions", "d", "p"), [(64, 128, 512), (65, 512, 128), (65, 128, 384), (17, 16, 48)])
@pytest.mark.parametrize("transposed", [False, True])
def test_linear_layers_over_positions_have_the_norms_and_sums_of_the_definition(transposed, positions, d, p, dtype):
    """Of the very operands; an example that holds NaN is dropped; and twice the same to the bit."""
    a, g = (torch.randn(70, positions, n, device=DEVICE).to(dtype) for n in (d, p))
    each = g.double().mT @ a.double()
    each = each.mT if transposed else each
    a[2, 3, 1], g[2, 5, 7] = float("nan"), float("inf")
    first, second = (projected(a, g, each.shape[1:], transposed) for _ in range(2))
    assert isinstance(first, Convolved)
    kept = torch.arange(70, device=DEVICE) != 2
    norms = first.squared_norm().sqrt()
    assert not torch.isfinite(norms[2])
    torch.testing.assert_close(norms[kept], each[kept].flatten(1).norm(dim=1), rtol=2e-5, atol=0.0)
    c = torch.rand(70, dtype=torch.float64, device=DEVICE) * kept
    total, again = (use.without(~kept).weighted_sum(c) for use in (first, second))
    expected = (each[kept] * c[kept].view(-1, 1, 1)).sum(0)
    assert float((total - expected).norm()) <= 2e-5 * float((norms * c)[kept].sum())
    assert torch.equal(total, again)
    assert torch.equal(first.squared_norm()[kept], second.squared_norm()[kept])


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_example_of_a_linear_layer_moves_the_sum_by_more_than_its_share(monkeypatch, dtype):
    """Coherent gradients whose positions nearly cancel, clipped to one: rounded, weighted operands would not cancel."""
    monkeypatch.setattr(conv_ops, "_PROGRAMS", 1)  # as many examples as ever are added up in fp32
    a, g = (torch.randn(1, 64, n, device=DEVICE) for n in (128, 256))
    a = (30.0 + a + 0.01 * torch.randn(513, 64, 128, device=DEVICE)).to(dtype)
    g = (g - g.mean(1, keepdim=True) + 0.01 * torch.randn(513, 64, 256, device=DEVICE)).to(dtype)
    shape = torch.Size((256, 128))
    whole = projected(a, g, shape)
    assert isinstance(whole, Convolved)
    factors = whole.squared_norm().rsqrt()
    total = whole.weighted_sum(factors)
    for gone in (0, 200, 512):
        kept = torch.arange(513, device=DEVICE) != gone
        moved = float((total - projected(a[kept], g[kept], shape).weighted_sum(factors[kept])).norm())
        assert 0.99 < moved <= 1 + 1e-5, gone


@pytest.mark.usefixtures("in_full_precision")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, None)])
def test_the_compiled_program_of_a_transformer_gives_the_sums_of_the_loop(data, dtype, tolerance):
    """65 positions, a non-finite example, spare rows. In bf16 it is to be as near to the loop in fp32 as without kernels."""
    images, labels = data[0][:48].clone(), data[1][:48]
    images[7] = float("nan")
    network, bound = AnyNetwork(lambda: VisionTransformer(depth=2)), torch.tensor([0.5], device=DEVICE)
    theta, batch = network.initial(0).unsqueeze(0).to(DEVICE), batch_of(images, labels, 41, 44)
    with conv_ops.kernels(on=False):
        expected = LoopedGradients(network, torch.float32).clipped_sums(theta, batch, bound)
        materialised = network.gradients(1, 48, DEVICE, dtype).clipped_sums(theta, batch, bound)
    program = network.gradients(1, 48, DEVICE, dtype)
    got = program.clipped_sums(theta, batch, bound)
    error, usual = (float((sums - expected).norm() / expected.norm()) for sums in (got, materialised))
    assert error < (tolerance or 1.5 * usual)
    traced = program._trace(0.5, theta[0], images, labels, batch.places[0])
    targets = [str(node.target) for node in traced.graph.nodes]
    assert sum("conv_sums" in target for target in targets) == 9  # four weights a layer, and the patches
    assert sum("position_sums" in target for target in targets) == 11  # their chunks; all biases; all normalisations
    assert any("attention" in target for target in targets)  # no scores in memory


# ---- whole networks, traced, compiled and captured


def small_wide(standardised=True):
    return WideResNet(depth=10, width=1, groups=4, standardised=standardised)


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator(device="cuda").manual_seed(0)
    images = torch.randn(600, 3, 32, 32, device=DEVICE, generator=generator)
    return images, torch.randint(0, 10, (600,), device=DEVICE, generator=generator)


def batch_of(images, labels, drawn, most):
    rows = torch.arange(drawn, device=DEVICE)
    places = torch.full((1, most), len(labels), device=DEVICE)
    places[0, :drawn] = rows
    start = torch.tensor([0, drawn], dtype=torch.int32, device=DEVICE)
    return Batch(images, labels, torch.zeros(len(labels), dtype=torch.int32, device=DEVICE), start, places, rows)


@pytest.mark.usefixtures("in_full_precision")
@pytest.mark.parametrize(("build", "dtype"), [(small_wide, torch.float32), (WideResNet, torch.bfloat16)])
def test_the_compiled_program_gives_the_sums_of_the_loop(data, build, dtype):
    """With a non-finite example, and spare rows. In bf16 forward and backward round, and norms with them: there the program is
    to be as near to the loop in fp32 as the one without kernels, which has the same operands."""
    images, labels = data[0][:48].clone(), data[1][:48]
    images[7] = float("nan")
    network, bound = AnyNetwork(build), torch.tensor([0.5], device=DEVICE)
    theta, batch = network.initial(0).unsqueeze(0).to(DEVICE), batch_of(images, labels, 41, 44)
    with conv_ops.kernels(on=False):
        expected = LoopedGradients(network, torch.float32).clipped_sums(theta, batch, bound)
        unfolded = network.gradients(1, 48, DEVICE, dtype).clipped_sums(theta, batch, bound)
    program = network.gradients(1, 48, DEVICE, dtype)
    assert program.step.channels_last
    got = program.clipped_sums(theta, batch, bound)
    error, usual = (float((sums - expected).norm() / expected.norm()) for sums in (got, unfolded))
    assert error < (1e-4 if dtype == torch.float32 else 1.5 * usual)
    traced = program._trace(0.5, theta[0], images, labels, batch.places[0])
    kernels = [n for n in traced.graph.nodes if n.target is torch.ops.dpivon.conv_sums.default]
    convolutions = [m for m in program.step.model.modules() if isinstance(m, nn.Conv2d)]
    assert len(kernels) == len(convolutions)


@pytest.mark.usefixtures("in_full_precision")
def test_a_captured_wide_residual_network_equals_the_loop(data):
    run = Run("dp-ivon-gradsq", 1, 1.0, 1.0, 0.1, 32)
    captured = Stack([run], AnyNetwork(small_wide), *data, dtype=torch.float32, block=8)
    looped = Stack([run], AnyNetwork(small_wide), *data, block=8)
    looped.gradients = LoopedGradients(looped.network, torch.float32)
    looped._launch, looped._replay_part = looped._step, Replay(looped._sums_of_part, torch.device("cpu"))
    for _ in captured.train(16):
        pass
    with conv_ops.kernels(on=False):
        for _ in looped.train(16):
            pass
    assert captured._replay.graph is not None
    start = captured.network.initial(1).to(DEVICE)
    assert float((captured.mean[0] - looped.mean[0]).norm() / (looped.mean[0] - start).norm()) < 1e-3


def shifted_net():
    """Without padding the first two layers see the offset everywhere: their gradients are nearly all mean. ReLU keeps it."""
    return nn.Sequential(
        StandardisedConv2d(3, 16, 3), nn.ReLU(), StandardisedConv2d(16, 32, 3, stride=2), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.Conv2d(32, 32, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 196, 10),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("build", "dtype"), [(shifted_net, torch.bfloat16), (shifted_net, torch.float32), (small_wide, torch.bfloat16)]
)
def test_no_example_moves_the_compiled_sum_by_more_than_c(monkeypatch, data, build, dtype):
    """b = 513 coherent gradients, for the very tensor that gets the noise."""
    monkeypatch.setattr(conv_ops, "_PROGRAMS", 1)  # as many examples as ever are added up in fp32
    network = AnyNetwork(build)
    theta, bound = network.initial(0).unsqueeze(0).to(DEVICE), torch.full((1,), 0.1, device=DEVICE)
    program = network.gradients(1, 516, DEVICE, dtype)
    labels = data[1][:1].expand(516).contiguous()
    for offset in (0.0, 30.0):
        alike = data[0][:1] + 0.01 * data[0][:516] + offset
        whole = program.clipped_sums(theta, batch_of(alike, labels, 513, 515), bound)
        assert whole.dtype == torch.float64
        for gone in (0, 200, 512):
            kept = torch.arange(516, device=DEVICE) != gone
            fewer = torch.cat([alike[kept], alike[:1]])
            moved = float((whole - program.clipped_sums(theta, batch_of(fewer, labels, 512, 515), bound)).norm())
            assert 0.05 < moved <= 0.1 * (1 + 1e-5), (offset, gone)


def test_a_network_that_views_its_images_gets_them_as_they_are(data):
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 16, 3, padding=1, stride=2), nn.Linear(16 * 256, 10)

        def forward(self, x):
            return self.head(torch.relu(self.conv(x)).view(len(x), -1))

    network, bound = AnyNetwork(Viewing), torch.tensor([0.5], device=DEVICE)
    theta, batch = network.initial(0).unsqueeze(0).to(DEVICE), batch_of(data[0][:20], data[1][:20], 18, 20)
    with conv_ops.kernels(on=False):
        expected = LoopedGradients(network, torch.float32).clipped_sums(theta, batch, bound)
    program = network.gradients(1, 20, DEVICE, torch.float32)
    torch.testing.assert_close(program.clipped_sums(theta, batch, bound), expected, rtol=1e-3, atol=1e-5)
    assert not program.step.channels_last


def test_the_switch_turns_the_kernels_off(data):
    network, bound = AnyNetwork(lambda: small_wide(standardised=False)), torch.tensor([0.5], device=DEVICE)
    theta, batch = network.initial(0).unsqueeze(0).to(DEVICE), batch_of(data[0][:8], data[1][:8], 8, 8)
    with conv_ops.kernels(on=False):
        program = network.gradients(1, 8, DEVICE, torch.float32)
        traced = program._trace(0.5, theta[0], batch.inputs, batch.labels, batch.places[0])
    assert not program.step.channels_last
    assert all("dpivon" not in str(node.target) for node in traced.graph.nodes)
    assert program.clipped_sums(theta, batch, bound).isfinite().all()
