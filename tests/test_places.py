"""Who sits where in a padded batch: drawn, so that nobody moves when one example is missing.

A GPU's libraries may add up one example's convolution in another order at another place. In bf16 that changes its gradient by
about 1e-3, and with it the sum; only the missing example's own place may tell.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch.fx import Interpreter

from dpivon import Augmentation
from dpivon.privacy.kernels import padded
from dpivon.privacy.kernels.padded import PaddedGradients
from dpivon.privacy.kernels.reference import Batch
from dpivon.privacy.mechanism import NoiseSpec
from dpivon.privacy.precision import compiled
from dpivon.privacy.stack import StackedSampler, room
from dpivon.privacy.streams import Streams
from dpivon.stacked import AnyNetwork, Run, Stack

CPU = torch.device("cpu")
BOUND, COUNT = 0.1, 24
VIEWED = Augmentation(3, flip=True, crop=2)


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.GroupNorm(4, 8), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(), nn.GroupNorm(4, 8), nn.Flatten(), nn.Linear(8 * 64, 10),
    )  # fmt: skip


class Attention(nn.Module):
    """Over patches, or over words that are read off the picture: the same few again and again."""

    def __init__(self, words=False):
        super().__init__()
        self.words = nn.Embedding(7, 16) if words else None
        self.patches = None if words else nn.Conv2d(3, 16, 4, stride=4)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.head(self.encoder(self.norm(self.tokens(x))).mean(1))

    def tokens(self, x):
        if self.words is None:
            return self.patches(x).flatten(2).mT
        return self.words((x.flatten(1)[:, :24] * 4).long() % 7)


NETWORKS = {"convolutions": conv_net, "patches": Attention, "words": lambda: Attention(words=True)}


# ---- a library that rounds by place


class ByPlace(Interpreter):
    """The traced program on a device whose convolutions round every other row towards zero. A real one rounds its sums
    before they are bf16, in an order that may depend on the place, and differs in fewer elements."""

    def call_function(self, target, args, kwargs):
        if target is not torch.ops.aten.convolution.default:
            return super().call_function(target, args, kwargs)
        wide = [t.double() if isinstance(t, torch.Tensor) else t for t in args]
        exact = super().call_function(target, tuple(wide), kwargs).float()
        cut = (exact.view(torch.int32) & -(2**16)).view(torch.float32)
        even = torch.arange(len(exact)).view(-1, *[1] * (exact.dim() - 1)) % 2 == 0
        return torch.where(even, exact, cut).to(args[0].dtype)


@pytest.fixture
def rounding_by_place(monkeypatch):
    monkeypatch.setattr(padded, "compiled", lambda traced, device, **how: ByPlace(traced).run)


class Sums:
    """Clipped sums of alike examples, whose gradients add up, at places of our choice."""

    def __init__(self, offset, augment, make=conv_net):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(COUNT, 3, 16, 16, generator=generator)
        self.images, self.labels = images[:1] + 0.01 * images + offset, torch.zeros(COUNT, dtype=torch.int64)
        self.views = None
        if augment is not None:
            self.views = augment.choice(list(torch.randint(2**32, (3, COUNT, 3), generator=generator)))
        network = AnyNetwork(make)
        self.theta = network.initial(0).unsqueeze(0)
        self.gradients = PaddedGradients(network, CPU, torch.bfloat16, augment)

    def at(self, places):
        """With these examples at the places 0, 1, …; COUNT leaves one empty. The rest is empty too."""
        places = torch.tensor([[*places, *[COUNT] * (COUNT - len(places))]])
        batch = Batch(self.images, self.labels, *[torch.zeros(0)] * 2, places, torch.zeros(0), self.views)
        return self.gradients.clipped_sums(self.theta, batch, torch.tensor([BOUND]))


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("augment", [None, VIEWED], ids=["as they are", "views"])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_an_example_that_leaves_its_place_empty_moves_the_sum_by_c_whatever_places_do(
    rounding_by_place, offset, augment
):
    sums = Sums(offset, augment)
    everyone = list(range(COUNT))
    whole = sums.at(everyone)
    for gone in (0, 9, COUNT - 1):
        left = sums.at([COUNT if i == gone else i for i in everyone])
        assert 0.9 * BOUND < float((whole - left).norm()) <= BOUND * (1 + 1e-5)
    moved_up = sums.at([*everyone[1:], COUNT])
    assert float((whole - moved_up).norm()) > BOUND * (1 + 1e-3)  # what packing in order would do on such a device


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_on_a_cpu_an_example_counts_the_same_at_every_place(offset):
    sums = Sums(offset, None)
    first = sums.at([5])
    for place in (1, 3, 20):
        torch.testing.assert_close(sums.at([COUNT] * place + [5]), first, rtol=1e-6, atol=1e-9)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("augment", [None, VIEWED], ids=["as they are", "views"])
@pytest.mark.parametrize("offset", [0.0, 3000.0])
@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_added_has_the_norm_that_was_measured(name, offset, augment):
    """In bf16, with clipping in force: the share is C long, alone and among others, whatever cancels over positions."""
    sums = Sums(offset, augment, NETWORKS[name])
    everyone = list(range(COUNT))
    whole = sums.at(everyone)
    for gone in (0, COUNT - 1):
        share = whole - sums.at([COUNT if i == gone else i for i in everyone])
        assert float(share.norm()) == pytest.approx(BOUND, rel=1e-5)
    assert float(sums.at([COUNT] * 9 + [9]).norm()) == pytest.approx(BOUND, rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, as torch.compile does")
@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_added_has_the_norm_that_was_measured_when_compiled(monkeypatch, name):
    """As above, of the program as the compiler fuses it for a CPU."""
    monkeypatch.setattr(padded, "compiled", lambda traced, device, **how: compiled(traced, torch.device("cuda"), **how))
    sums = Sums(30.0, VIEWED, NETWORKS[name])
    everyone = list(range(COUNT))
    whole = sums.at(everyone)
    for gone in (0, 9, COUNT - 1):
        share = whole - sums.at([COUNT if i == gone else i for i in everyone])
        assert float(share.norm()) == pytest.approx(BOUND, rel=1e-5)


# ---- the draw


def sampler(expected, examples, runs=1, seed=7):
    data = torch.zeros(examples, 1, 32, 32), torch.zeros(examples, dtype=torch.int64)
    made = [Run("dp-sgd", seed + k, 1.0, 1.0, 0.1, expected) for k in range(runs)]
    return Stack(made, AnyNetwork(lambda: nn.Sequential(nn.Flatten(), nn.Linear(1024, 2))), *data).sampler


def seats_of(block, step, run, most):
    """The places of a run's examples, in the order of their numbers."""
    begin, end = int(block.start[step, run]), int(block.start[step, run + 1])
    return block.seats[step, begin:end] - run * most


def test_places_are_drawn_uniformly_and_anew_for_every_run_and_step():
    source, steps = sampler(4, 40, runs=2), 3000
    block = source.draw(0, steps)
    counted = torch.zeros(2, 2, source.most)  # of the first and the last example of a batch, run by run
    for step in set(range(steps)) - set(block.overflows):
        for run in range(2):
            seats = seats_of(block, step, run, source.most)
            assert len(set(seats.tolist())) == len(seats)
            if len(seats):
                counted[run, 0, seats[0]] += 1
                counted[run, 1, seats[-1]] += 1
    expected = counted.sum(2, keepdim=True) / source.most
    chi = ((counted - expected) ** 2 / expected).sum(2)
    freedom = source.most - 1
    assert (chi < freedom + 5 * (2 * freedom) ** 0.5).all()
    orders = source.streams.orders(64, 0, 2)
    assert torch.equal(orders.sort(2).values, torch.arange(64).expand(2, 2, 64))
    flat = orders.flatten(0, 1)
    assert all((a == b).float().mean() < 0.2 for i, a in enumerate(flat) for b in flat[:i])


def test_the_seats_of_a_step_do_not_depend_on_how_it_is_drawn():
    """A run that is resumed, or whose steps are drawn in other blocks, has its examples where they were."""
    source = sampler(6, 50)
    whole, tail = source.draw(10, 6), source.draw(13, 3)
    assert torch.equal(whole.places[3:], tail.places)
    again = StackedSampler(_specs(source), 50, Streams([7], CPU), CPU)
    assert torch.equal(again.draw(10, 6).places, whole.places)


def _specs(source):
    rate = float(source.rates[0]) / 2**32
    return [NoiseSpec(1.0, 1.0, rate * source.examples, rate)]


@pytest.mark.slow
def test_of_a_batch_too_large_for_one_part_the_last_are_drawn():
    """Whoever is drawn last sits in the second part; at x's arrival in a full one that is x or one other."""
    source = sampler(4, 12)
    everyone = torch.ones(1, 1, 12, dtype=torch.int8)
    source.streams.poisson = lambda *_: everyone
    source.most = source.capacity = 11
    last = torch.zeros(12)
    for step in range(1200):
        first, second = source.parts(step)
        members = [part[0][: int(part[2][-1])] for part in (first, second)]
        assert [len(m) for m in members] == [11, 1]
        assert sorted(torch.cat(members).tolist()) == list(range(12))
        assert sorted(first[3][0].tolist()) == list(range(11))
        last[members[1]] += 1
    assert (abs(last - 100) < 5 * (1200 / 12 * 11 / 12) ** 0.5).all()


def test_parts_hold_every_drawn_example_of_every_run_once():
    source = sampler(6, 50, runs=3)
    source.most, source.capacity = 4, 9
    for step in range(5):
        mask = source.streams.poisson(50, source.rates, step, 1)[0]
        seen = torch.zeros_like(mask)
        for index, model, start, places, seats in source.parts(step):
            assert int(start[-1]) <= 9
            for run in range(3):
                begin, end = int(start[run]), int(start[run + 1])
                seen[run].index_add_(0, index[begin:end], torch.ones(end - begin, dtype=seen.dtype))
                assert (model[begin:end] == run).all()
                assert torch.equal(places.flatten()[seats[begin:end]], torch.arange(begin, end))
                assert int((places[run] < 9).sum()) == end - begin
        assert torch.equal(seen, mask)


# ---- blocks that are drawn before their time, and how much room there is


def test_blocks_drawn_ahead_are_those_drawn_when_they_are_needed():
    """Also after a stop, in blocks of another length, and with batches that do not fit."""
    images, labels = torch.randn(40, 3, 8, 8), torch.randint(10, (40,))
    made = []
    for ahead in (False, True):
        stack = Stack([Run("dp-sgd", 3, 1.0, 1.0, 0.1, 8)], AnyNetwork(small), images, labels, block=3)
        stack._draws_ahead, stack.sampler.most = ahead, 9
        draws, original = [], stack.sampler.draw
        stack.sampler.draw = lambda *args, draws=draws, original=original: draws.append(args) or original(*args)
        for steps in (6, 2, 4):
            for _ in stack.train(steps):
                pass
        assert stack._buffers is not None
        made.append((stack.mean, draws))
    assert torch.equal(made[0][0], made[1][0])
    assert made[0][1] == [(0, 3), (3, 3), (6, 2), (8, 3), (11, 1)]
    assert made[1][1] == [(0, 3), (3, 3), (6, 3), (8, 3), (11, 3), (12, 3)]  # each once, and one that was not needed


def test_a_block_drawn_ahead_by_other_seeds_is_not_used():
    images, labels = torch.randn(40, 3, 8, 8), torch.randint(10, (40,))
    stack = Stack([Run("dp-sgd", 3, 1.0, 1.0, 0.1, 8)], AnyNetwork(small), images, labels, block=2)
    stack._draws_ahead = True
    next(stack.train(2))
    (first, _, known), _ = stack._ahead, stack.streams.refresh()
    stack._draw(2)
    assert not torch.equal(stack._buffers.index, known.index)
    assert torch.equal(stack._buffers.places, stack.sampler.draw(first, 2).places)


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


@pytest.mark.parametrize("among", [1, 30])
@pytest.mark.parametrize("expected", [0.0, 0.4, 6.0, 64.0, 256.0, 2048.0])
def test_the_room_for_a_batch_is_the_cheapest(expected, among):
    """Against Poisson draws in as many passes as they take: no capacity is cheaper by more than a hundredth and two rows."""
    draws = torch.poisson(torch.full((20_000, among), expected), generator=torch.Generator().manual_seed(0)).amax(1)
    found, *others = (
        float((size + 64) * (draws / size).ceil().clamp(min=1).mean())
        for size in (room(expected, among), *range(1, int(2 * expected) + 20, 1 + int(expected) // 64))
    )
    assert found < 1.01 * min(others) + 2
