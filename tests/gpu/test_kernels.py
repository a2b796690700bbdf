"""The stacked kernels on a GPU: against the looped reference, and against the guarantee. Skipped where there is no GPU."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: run `pytest tests/gpu` on a machine with one", allow_module_level=True)

from dpivon import ArgumentError, Augmentation
from dpivon.models import CompactCNN
from dpivon.privacy.kernels.padded import PaddedGradients
from dpivon.privacy.kernels.paper.layout import Layout
from dpivon.privacy.kernels.paper.program import Program
from dpivon.privacy.kernels.reference import Batch, LoopedGradients
from dpivon.privacy.kernels.replay import Replay
from dpivon.privacy.streams import PRIVACY, SAMPLING, VIEWS, Streams, philox
from dpivon.stacked import AnyNetwork, PaperNetwork, Run, Stack

DEVICE = torch.device("cuda")
LAYOUT = Layout()


def batch_of(counts, images, labels, spare=3):
    """The first rows of images, given out to the runs in turn."""
    runs, total = len(counts), sum(counts)
    capacity, most = total + spare, max(counts) + 2
    model = torch.zeros(capacity, dtype=torch.int32, device=DEVICE)
    places = torch.full((runs, most), capacity, device=DEVICE)
    seats = torch.zeros(capacity, dtype=torch.int64, device=DEVICE)
    start = [0]
    for k, n in enumerate(counts):
        rows = torch.arange(start[-1], start[-1] + n, device=DEVICE)
        model[rows], places[k, :n] = k, rows
        seats[rows] = k * most + torch.arange(n, device=DEVICE)
        start.append(start[-1] + n)
    start = torch.tensor(start, dtype=torch.int32, device=DEVICE)
    return Batch(images[:capacity], labels[:capacity], model, start, places, seats)


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator(device="cuda").manual_seed(0)
    images = torch.randn(600, 3, 32, 32, device=DEVICE, generator=generator)
    return images, torch.randint(0, 10, (600,), device=DEVICE, generator=generator)


def kernels(runs, capacity):
    return Program(LAYOUT, runs, capacity, DEVICE, torch.bfloat16)


def channels_last(images):
    return images.permute(0, 2, 3, 1).bfloat16().contiguous()


def rows(runs):
    network = PaperNetwork()
    theta = torch.stack([network.initial(k) for k in range(runs)]).to(DEVICE)
    return theta + 0.02 * torch.randn(theta.shape, device=DEVICE, generator=torch.Generator("cuda").manual_seed(1))


def test_kernels_agree_with_the_loop_to_the_precision_of_their_operands(data):
    counts, bound = [40, 0, 1, 33], torch.tensor([2.0, 1.0, 0.5, 30.0], device=DEVICE)
    theta = rows(4)
    batch = batch_of(counts, *data)
    expected = LoopedGradients(PaperNetwork(), torch.float32).clipped_sums(theta, batch, bound)
    program = kernels(4, len(batch.labels))
    low = dataclasses.replace(batch, inputs=program.prepare(batch.inputs))
    assert torch.equal(low.inputs, channels_last(batch.inputs))
    got = program.clipped_sums(theta, low, bound)
    assert float(got[1].abs().max()) == 0.0  # an empty batch
    for k in (0, 2, 3):
        assert float((got[k] - expected[k]).norm() / expected[k].norm()) < 0.1
        assert float(torch.nn.functional.cosine_similarity(got[k], expected[k], dim=0)) > 0.995


def test_a_wider_network_has_smaller_tiles_and_one_too_wide_is_refused_before_anything_is_drawn(data):
    wide, bound = PaperNetwork(Layout(widths=(64, 128, 256), hidden=256)), torch.tensor([2.0, 30.0], device=DEVICE)
    theta = torch.stack([wide.initial(k) for k in range(2)]).to(DEVICE)
    batch = batch_of([30, 21], *data)
    expected = LoopedGradients(wide, torch.float32).clipped_sums(theta, batch, bound)
    program = Program(wide.layout, 2, len(batch.labels), DEVICE, torch.bfloat16)
    got = program.clipped_sums(theta, dataclasses.replace(batch, inputs=program.prepare(batch.inputs)), bound)
    for k in range(2):
        assert float((got[k] - expected[k]).norm() / expected[k].norm()) < 0.1
        assert float(torch.nn.functional.cosine_similarity(got[k], expected[k], dim=0)) > 0.995
    with pytest.raises(ArgumentError, match="more shared memory"):
        PaperNetwork(Layout(widths=(64, 1024, 2048))).gradients(1, 16, DEVICE, torch.bfloat16)


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_no_example_moves_the_sum_by_more_than_c(data, offset):
    """b = 512 coherent gradients and shifted activations, for the very tensor that gets the noise."""
    images, labels = data
    alike = channels_last(images[:1] + 0.01 * images[:516] + offset)
    labels = labels[:1].expand(516).contiguous()
    theta, bound = rows(1), torch.ones(1, device=DEVICE)
    program = kernels(1, 516)
    whole = program.clipped_sums(theta, batch_of([513], alike, labels), bound)
    assert whole.dtype == torch.float64
    for gone in (0, 200, 512):
        kept = torch.arange(516, device=DEVICE) != gone
        fewer = torch.cat([alike[kept], alike[:1]]), torch.cat([labels[kept], labels[:1]])
        less = program.clipped_sums(theta, batch_of([512], *fewer, spare=4), bound)
        moved = float((whole - less).norm())
        assert 0.5 < moved <= 1 + 1e-5  # clipping is in force


def test_a_non_finite_example_contributes_zero(data):
    images, labels = channels_last(data[0]), data[1]
    theta, bound = rows(1), torch.ones(1, device=DEVICE)
    program = kernels(1, 24)
    order = torch.cat([torch.arange(7), torch.arange(8, 30)]).to(DEVICE)
    expected = program.clipped_sums(theta, batch_of([19], images[order], labels[order], spare=5), bound)
    images[7, 3, 3, 1] = float("nan")
    got = program.clipped_sums(theta, batch_of([20], images, labels, spare=4), bound)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("label", [-100, 10])
def test_a_label_that_is_no_class_contributes_zero(data, label):
    images, labels = channels_last(data[0]), data[1].clone()
    theta, bound = rows(1), torch.ones(1, device=DEVICE)
    program = kernels(1, 24)
    order = torch.cat([torch.arange(7), torch.arange(8, 30)]).to(DEVICE)
    expected = program.clipped_sums(theta, batch_of([19], images[order], labels[order], spare=5), bound)
    labels[7] = label
    got = program.clipped_sums(theta, batch_of([20], images, labels, spare=4), bound)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_streams_are_those_of_the_cpu():
    seeds = [5, 1234567890123]
    gpu, cpu = Streams(seeds, DEVICE), Streams(seeds, torch.device("cpu"))
    step = torch.tensor(7)
    a = gpu.normal(torch.empty(2, 10_001, device=DEVICE), step.to(DEVICE), PRIVACY).cpu()
    b = cpu.normal(torch.empty(2, 10_001), step, PRIVACY)
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    a = gpu.normal(torch.empty(2, 10_001, dtype=torch.float64, device=DEVICE), step.to(DEVICE), PRIVACY).cpu()
    b = cpu.normal(torch.empty(2, 10_001, dtype=torch.float64), step, PRIVACY)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    rates = torch.tensor([2**31, 2**30])
    assert torch.equal(gpu.poisson(999, rates.to(DEVICE), 3, 2).cpu(), cpu.poisson(999, rates, 3, 2))
    assert len(philox(1, __import__("numpy").arange(3), 0, SAMPLING)) == 4


def test_a_captured_step_draws_new_batches_and_new_noise_every_time(data):
    """lr = 0 leaves the parameters alone, so that releases differ by their draws only."""
    stack = Stack([Run("dp-sgd", 3, 1.0, 1.0, 1e-12, 32)], PaperNetwork(), *data, dtype=torch.bfloat16, block=8)
    seen = []
    for _ in stack.train(40):
        seen.append((stack.mechanism._noise.clone(), stack.parts[0].state["velocity"].clone(), int(stack._t)))
    assert stack._replay.graph is not None
    assert [t for *_, t in seen] == [8, 16, 24, 32, 40]
    for (a, *_), (b, *_) in itertools.pairwise(seen):
        correlation = float((a * b).mean())
        assert abs(correlation) < 5 / a.numel() ** 0.5
    positions = stack._buffers.index[:8]
    assert len({tuple(row.tolist()) for row in positions}) == 8


def test_a_run_in_a_captured_stack_equals_the_same_run_alone(data):
    runs = [
        Run("dp-ivon-gradsq", 11, 1.0, 2.0, 0.5, 64),
        Run("dp-sgd", 12, 0.5, 1.0, 0.1, 32),
        Run("dp-adam", 13, 2.0, 0.5, 0.01, 48),
    ]
    together = Stack(runs, PaperNetwork(), *data, dtype=torch.bfloat16, block=8)
    for _ in together.train(24):
        pass
    for i, run in enumerate(runs):
        alone = Stack([run], PaperNetwork(), *data, dtype=torch.bfloat16, block=8)
        for _ in alone.train(24):
            pass
        a, b = together.mean[together._row(i)], alone.mean[0]
        start = PaperNetwork().initial(run.seed).to(DEVICE)
        assert float((a - b).norm()) < 0.02 * float((b - start).norm())


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 24, 3, padding=1, groups=2),
        nn.ReLU(), nn.Flatten(), nn.Linear(24 * 256, 10),
    )  # fmt: skip


@pytest.mark.usefixtures("in_full_precision")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_any_network_captured_equals_the_loop(data, dtype, tolerance):
    """Padding, views and capture change nothing: the same steps as the loop over runs makes from the same streams."""
    runs = [
        Run("dp-ivon-gradsq", 1, 1.0, 1.0, 0.1, 32),
        Run("dp-adam", 2, 2.0, 0.5, 1e-3, 16),
    ]
    captured = Stack(runs, AnyNetwork(conv_net), *data, dtype=dtype, block=8)
    looped = Stack(runs, AnyNetwork(conv_net), *data, block=8)
    looped.gradients = LoopedGradients(looped.network, torch.float32)
    looped._launch, looped._replay_part = looped._step, Replay(looped._sums_of_part, torch.device("cpu"))
    for stack in (captured, looped):
        for _ in stack.train(16):
            pass
    assert captured._replay.graph is not None
    start = torch.stack([captured.network.initial(r.seed) for r in captured.runs]).to(DEVICE)
    for a, b, s in zip(captured.mean, looped.mean, start, strict=True):
        assert float((a - b).norm() / (b - s).norm()) < tolerance


def test_any_network_captured_strikes_a_non_finite_example(data):
    images, labels = data[0][:40].clone(), data[1][:40]
    images[3] = float("nan")
    stack = Stack([Run("dp-sgd", 1, 1.0, 1.0, 0.1, 20)], AnyNetwork(conv_net), images, labels, block=8)
    for _ in stack.train(16):
        pass
    assert torch.isfinite(stack.mean).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_no_example_moves_the_compiled_sum_of_any_network_by_more_than_c(data, dtype, offset):
    """The compiler must not compute norms of numbers that the products did not see."""
    images, labels = data
    alike, labels = images[:1] + 0.01 * images[:516] + offset, labels[:1].expand(516).contiguous()
    network = AnyNetwork(conv_net)
    theta, bound = network.initial(0).unsqueeze(0).to(DEVICE), torch.full((1,), 0.1, device=DEVICE)
    gradients = network.gradients(1, 516, DEVICE, dtype)
    whole = gradients.clipped_sums(theta, batch_of([513], alike, labels), bound)
    for gone in (0, 200, 512):
        kept = torch.arange(516, device=DEVICE) != gone
        fewer = torch.cat([alike[kept], alike[:1]]), torch.cat([labels[kept], labels[:1]])
        batch = batch_of([512], *fewer, spare=4)
        batch = dataclasses.replace(batch, places=torch.nn.functional.pad(batch.places, (0, 1), value=516))
        moved = float((whole - gradients.clipped_sums(theta, batch, bound)).norm())
        assert 0.05 < moved <= 0.1 * (1 + 1e-5)


VIEWED = Augmentation(3, flip=True, crop=4)


def test_views_are_those_of_the_cpu():
    seeds, element = [5, 1234567890123], torch.arange(600).view(-1, 3)
    run = torch.arange(200, dtype=torch.int32) % 2
    found = [
        VIEWED.choice(Streams(seeds, d).words(run.to(d), element.to(d), torch.tensor(7, device=d), VIEWS)).cpu()
        for d in (DEVICE, torch.device("cpu"))
    ]
    assert torch.equal(*found)
    images = torch.randn(200, 3, 32, 32)
    assert torch.equal(VIEWED.apply(images.to(DEVICE), found[0].to(DEVICE)).cpu(), VIEWED.apply(images, found[0]))


@pytest.mark.usefixtures("in_full_precision")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_captured_views_equal_the_loop_in_parts_and_at_once(data, dtype, tolerance):
    runs = [
        Run("dp-sgd", 1, 1.0, 1.0, 0.003, 32),
        Run("dp-adam", 2, 2.0, 1.0, 1e-3, 16),
    ]  # calm: rounding must not grow
    stacks = [Stack(runs, AnyNetwork(CompactCNN), *data, dtype=dtype, block=8, augment=VIEWED) for _ in range(3)]
    whole, parts, looped = stacks
    parts.gradients = PaddedGradients(parts.network, DEVICE, dtype, VIEWED, at_once=20)
    looped.gradients = LoopedGradients(looped.network, torch.float32, VIEWED)
    looped._launch, looped._replay_part = looped._step, Replay(looped._sums_of_part, torch.device("cpu"))
    for stack in stacks:
        for _ in stack.train(16):
            pass
    assert whole._replay.graph is not None
    assert parts._replay.graph is not None
    assert len(parts.gradients._parts(parts._batch(*parts.sampler.parts(0)[0]))) > 1
    start = torch.stack([whole.network.initial(r.seed) for r in whole.runs]).to(DEVICE)
    for captured in (whole, parts):
        for a, b, s in zip(captured.mean, looped.mean, start, strict=True):
            assert float((a - b).norm() / (b - s).norm()) < tolerance


def test_a_captured_step_makes_new_views_every_time():
    """One picture, always drawn, and steps of no size: what is released differs by its views, and noise of next to nothing."""
    image = torch.randn(1, 3, 32, 32, device=DEVICE)
    run = Run("dp-sgd", 3, 1e-6, 1.0, 1e-12, 1, {"momentum": 0.0})
    stack = Stack(
        [run], AnyNetwork(CompactCNN), image, torch.zeros(1, dtype=torch.int64, device=DEVICE), block=1, augment=VIEWED
    )
    seen = []
    original = stack._apply
    kept = torch.zeros(1, stack.network.size, device=DEVICE)

    def keeping(g, *rest):
        kept.copy_(g)  # captured with the step
        return original(g, *rest)

    stack._apply = keeping
    for _ in stack.train(10):
        seen.append(kept.clone())
    assert stack._replay.graph is not None
    for a, b in itertools.pairwise(seen[3:]):
        assert float((a - b).norm()) > 0.01 * float(a.norm())


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_no_example_moves_the_compiled_sum_of_its_views_by_more_than_c(data, offset):
    images, labels = data
    alike, labels = images[:1] + 0.01 * images[:516] + offset, labels[:1].expand(516).contiguous()
    network = AnyNetwork(CompactCNN)
    theta, bound = network.initial(0).unsqueeze(0).to(DEVICE), torch.full((1,), 0.1, device=DEVICE)
    gradients = PaddedGradients(network, DEVICE, torch.bfloat16, VIEWED, at_once=128)
    streams, numbers = Streams([9], DEVICE), torch.arange(516 * 3, device=DEVICE).view(-1, 3)
    run, at = torch.zeros(516, dtype=torch.int32, device=DEVICE), torch.zeros((), dtype=torch.int64, device=DEVICE)
    views = VIEWED.choice(streams.words(run, numbers, at, VIEWS))

    def sums(rows, count):
        batch = batch_of([count], alike[rows], labels[rows], spare=516 - count)
        places = torch.nn.functional.pad(batch.places, (0, 520 - batch.places.shape[1]), value=516)
        return gradients.clipped_sums(theta, dataclasses.replace(batch, places=places, views=views[rows]), bound)

    every = torch.arange(516, device=DEVICE)
    whole = sums(every, 513)
    for gone in (0, 200, 512):
        rows = torch.cat([every[every != gone], every[:1]])
        moved = float((whole - sums(rows, 512)).norm())
        assert 0.05 < moved <= 0.1 * (1 + 1e-5)
