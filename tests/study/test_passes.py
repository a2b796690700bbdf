"""Ways to make forward passes: each says what the eager one says, and one that does not is found out and left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpivon.errors import ArgumentError
from dpivon.models import MLP, CompactCNN
from dpivon.predict import entropy
from dpivon.privacy.kernels.paper.layout import Layout
from dpivon.stacked import AnyNetwork, PaperNetwork
from dpivon.study.run import predict as passes
from dpivon.study.run.predict import (
    SWITCH,
    CompiledPasses,
    EagerPasses,
    KernelPasses,
    apart,
    draw_rows,
    eager_will_do,
    fast_ways,
    first_that_agrees,
    normalised,
    predict_row,
)

CPU = torch.device("cpu")
SMALL = Layout(image=16, widths=(16, 32), hidden=32, classes=8)
NETWORKS = {
    "paper": (lambda: PaperNetwork(SMALL), (3, 16, 16)),
    "compact": (lambda: AnyNetwork(lambda: CompactCNN(widths=(16, 32), depths=(1, 2))), (3, 16, 16)),
    "no images": (lambda: AnyNetwork(lambda: MLP(20, 5)), (20,)),
}


def case(name, images=37, draws=4):
    build, shape = NETWORKS[name]
    network, generator = build(), torch.Generator().manual_seed(0)
    mean = network.initial(1)
    rows = draw_rows(mean, torch.full_like(mean, 0.03), samples=draws, seed=2)
    return network, rows, torch.randn(images, *shape, generator=generator)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def test_on_a_cpu_every_bit_is_that_of_the_plain_loop():
    """64 images of one set at a time, channels last, one model, sums in the order of draws: what tables were made with."""
    network, generator = PaperNetwork(SMALL), torch.Generator().manual_seed(0)
    sets = [torch.randint(0, 256, (n, 3, 16, 16), dtype=torch.uint8, generator=generator) for n in (130, 1)]
    sets.append(torch.randn(70, 3, 16, 16, generator=generator))
    mean = network.initial(1)
    std = torch.full_like(mean, 0.03)
    found = predict_row(network, mean, std, sets, samples=5, seed=4)
    generator = torch.Generator().manual_seed(4)
    rows = [mean] + [mean + std * torch.randn(mean.shape, generator=generator) for _ in range(5)]
    model = network.model(mean).eval()
    for j, images in enumerate(sets):
        firsts, averages, gains = [], [], []
        for part in images.split(64):
            x = normalised(part).contiguous(memory_format=torch.channels_last)
            first, *others = (network.load(row, model)(x).softmax(-1) for row in rows)
            average, entropies = torch.zeros_like(first), torch.zeros(len(first), dtype=torch.float64)
            for probs in others:
                average, entropies = average + probs, entropies + entropy(probs)
            firsts.append(first)
            averages.append(average / 5)
            gains.append((entropy(average / 5) - entropies / 5).clamp_min(0))
        assert torch.equal(found["mean"][j].probs, torch.cat(firsts))
        assert torch.equal(found["average"][j].probs, torch.cat(averages))
        assert torch.equal(found["average"][j].mutual_information, torch.cat(gains))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_with_memory_of_its_own_says_the_same(name, channels_last):
    """On a CPU nothing is compiled; padding, copying and layout are the same. 37 images in calls of 16; one row is NaN."""
    network, rows, x = case(name)
    rows[2] = torch.full_like(rows[2], torch.nan)
    before = [row.clone() for row in rows]
    way, seen_by = CompiledPasses(network, CPU, channels_last=channels_last, batch=16), []
    found = list(way.logits(rows, x))
    way._run.register_forward_pre_hook(lambda module, args: seen_by.append(args[0]))
    list(way.logits(rows[:1], x))
    assert [tuple(call.shape) for call in seen_by] == [(16, *x.shape[1:])] * 3
    if x.dim() == 4 and channels_last:
        assert all(call.is_contiguous(memory_format=torch.channels_last) for call in seen_by)
    for got, expected in zip(found, EagerPasses(network, CPU).logits(rows, x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert [bool(torch.isfinite(got).all()) for got in found] == [True, True, False, True, True]
    assert all(torch.equal(a, b) for a, b in zip(rows, before, strict=True) if torch.isfinite(b).all())


def test_one_program_serves_all_rows_and_all_images(monkeypatch):
    """Traced as on a GPU, and then run as it is: other rows, another number of images and NaN compile nothing anew."""
    traced = lambda model, device: torch.compile(model, dynamic=False, backend="aot_eager")  # noqa: E731
    monkeypatch.setattr(passes, "compiled", traced)
    network, rows, x = case("compact")
    rows[1] = torch.full_like(rows[1], torch.nan)
    way = CompiledPasses(network, CPU, channels_last=True, batch=16)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for images in (x, x[:5]):
        expected = EagerPasses(network, CPU).logits(rows, images)
        for got, logits in zip(way.logits(rows, images), expected, strict=True):
            torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_sets_that_are_joined_come_apart_again():
    network, rows, x = case("paper", images=50)
    sets = [x[:20], (x[20:21] * 60 + 128).clamp(0, 255).byte(), x[21:]]
    joined = CompiledPasses(network, CPU, channels_last=True, batch=16)
    joined.at_once = 32  # two calls, with sets over their border
    options = {"samples": 3, "seed": 5}
    mean, std = rows[0], torch.full_like(rows[0], 0.03)
    apart_, together = (predict_row(network, mean, std, sets, passes=way, **options) for way in (None, joined))
    for way in ("mean", "average"):
        for a, b in zip(apart_[way], together[way], strict=True):
            torch.testing.assert_close(a.probs, b.probs, rtol=1e-4, atol=1e-6)
            if way == "average":
                torch.testing.assert_close(a.mutual_information, b.mutual_information, rtol=1e-3, atol=1e-6)


class Changed:
    """The eager way with something done to it."""

    name, at_once, joins = "changed", 64, False

    def __init__(self, network, rows=lambda r: r, images=lambda x: x, logits=lambda z: z):
        self.eager, self.changes = EagerPasses(network, CPU), (rows, images, logits)

    def logits(self, rows, images):
        change_rows, change_images, change_logits = self.changes
        for z in self.eager.logits(change_rows(rows), change_images(images)):
            yield change_logits(z)


def last_lost(z):
    return torch.cat([z[:-4], torch.zeros_like(z[-4:])])


BROKEN = {
    "another image": {"images": lambda x: x.roll(1, 0)},
    "another row": {"rows": lambda r: [*r[1:], r[0]]},
    "the mean in place of draws": {"rows": lambda r: [r[0]] * len(r)},
    "turned images": {"images": lambda x: x.flip(-1)},
    "channels in another order": {"images": lambda x: x.flip(1)},
    "a part that was never written": {"logits": last_lost},
    "logits too large": {"logits": lambda z: 1.1 * z},
    "classes in another order": {"logits": lambda z: z.flip(-1)},
    "nothing but NaN": {"logits": lambda z: z * torch.nan},
}


@pytest.mark.parametrize("name", ["paper", "compact"])
@pytest.mark.parametrize("bug", BROKEN)
def test_a_broken_way_is_found_out_even_in_a_network_that_has_learned_nothing(bug, name):
    network, rows, x = case(name, images=100)
    said = []
    ways = iter([lambda: Changed(network, **BROKEN[bug])])
    eager = EagerPasses(network, CPU)
    assert first_that_agrees(ways, eager, rows, x, said.append) is eager
    assert len(said) == 1
    assert "changed is off by" in said[0]


def test_a_way_that_fails_is_passed_over_and_the_next_one_tried():
    network, rows, x = case("paper")

    def fails():
        raise torch.OutOfMemoryError("no room\nand a long story")

    tried, said = [], []
    good, never = Changed(network), lambda: pytest.fail("tried although another was good")
    ways = iter([fails, lambda: tried.append(1) or Changed(network, **BROKEN["another row"]), lambda: good, never])
    assert first_that_agrees(ways, EagerPasses(network, CPU), rows, x, said.append) is good
    assert tried == [1]
    assert len(said) == 2
    assert "OutOfMemoryError: no room)" in said[0]


def rounded(x):
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def cut_off(x):
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("name", ["paper", "compact"])
def test_rounding_to_ten_bits_is_far_from_the_tolerance(name, scale, monkeypatch):
    """TF32 as Triton cuts it off, held to TF32 as cuDNN rounds it; in an untrained network, and in one that is very sure."""
    network, rows, x = case(name, images=100)
    size = 32 * 8 + 8 if name == "paper" else 32 * 10 + 10
    rows = [torch.cat([row[:-size], scale * row[-size:]]) for row in rows]  # the last layer comes last
    plain = nn.Conv2d._conv_forward

    class Emulated(EagerPasses):
        def __init__(self, low):
            super().__init__(network, CPU)
            self.low = low

        def logits(self, rows, images):
            def conv(layer, x, weight, bias):
                return plain(layer, self.low(x), self.low(weight), bias)

            with monkeypatch.context() as patch:
                patch.setattr(nn.Conv2d, "_conv_forward", conv)
                return list(super().logits(rows, images))

    off, allowed = apart(Emulated(cut_off), Emulated(rounded), rows, x)
    assert 0 < off < allowed / 4


def test_who_is_asked_when(monkeypatch):
    gpu = torch.device("cuda")
    assert eager_will_do(CPU, 10**9)
    assert eager_will_do(gpu, 1000)  # over before anything is compiled
    assert not eager_will_do(gpu, 10**9)
    monkeypatch.setenv(SWITCH, "eager")
    assert eager_will_do(gpu, 10**9)
    monkeypatch.setenv(SWITCH, "fast")
    with pytest.raises(ArgumentError, match=r"DPIVON_EVALUATION='fast'.*eager"):
        eager_will_do(gpu, 10**9)


@pytest.fixture
def convolutions():
    """torch's switch for their precision, as it was afterwards."""
    switch = torch.backends.cudnn.conv
    before, switch.fp32_precision = switch.fp32_precision, "tf32"  # torch's default
    yield switch
    switch.fp32_precision = before


def test_ways_in_their_order(monkeypatch, convolutions):
    monkeypatch.setattr(KernelPasses, "__init__", lambda self, layout, device: None)
    for name, expected in {
        "paper": ["kernels", "a compiled network, channels last", "a compiled network"],
        "compact": ["a compiled network, channels last", "a compiled network"],
        "no images": ["a compiled network"],
    }.items():
        network, rows, _ = case(name)
        assert [make().name for make in fast_ways(network, rows[0])] == expected
    for precision in ("ieee", "none"):  # the second is what `cudnn.allow_tf32 = False` comes to
        convolutions.fp32_precision = precision
        assert "kernels" not in [make().name for make in fast_ways(PaperNetwork(SMALL), PaperNetwork(SMALL).initial(0))]
