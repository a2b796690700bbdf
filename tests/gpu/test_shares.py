"""One example's share of a compiled sum on a GPU, and what it depends on: its place, its company, the day.

The guarantee needs three things: a share of at most C, the same whoever sits at the other places, and places that are drawn
(`tests/test_places.py`). It does not need shares that are the same at every place. Those tests are marked: where one fails, a
library rounds by place, and its name says which; `pytest tests/gpu/test_shares.py --runxfail` says where and how much.
Skipped where there is no GPU.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: run `pytest tests/gpu` on a machine with one", allow_module_level=True)

from dpivon import Augmentation
from dpivon.models import CompactCNN
from dpivon.privacy.kernels.padded import PaddedGradients
from dpivon.privacy.kernels.reference import Batch
from dpivon.privacy.streams import VIEWS, Streams
from dpivon.stacked import AnyNetwork

DEVICE = torch.device("cuda")
BOUND, COUNT, AT_ONCE = 0.1, 513, 128
GONE = (0, 200, COUNT - 1)
may_depend_on_the_place = pytest.mark.xfail(
    strict=False,
    raises=AssertionError,  # any other error is a fault
    reason="a library may round by place: places are drawn, so this is no fault, but good to know",
)


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 24, 3, padding=1, groups=2),
        nn.ReLU(), nn.Flatten(), nn.Linear(24 * 256, 10),
    )  # fmt: skip


class Patches(nn.Module):
    """Attention over patches, with norms of layers."""

    def __init__(self):
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 32, 4, stride=4), nn.LayerNorm(32)
        self.encoder = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.encoder(self.norm(self.patches(x).flatten(2).mT)).mean(1))


NETWORKS = {
    "plain": (conv_net, None),
    "views": (CompactCNN, Augmentation(3, flip=True, crop=4)),
    "attention": (Patches, None),
    "attention of views": (Patches, Augmentation(2, flip=True, crop=4)),
}


@functools.cache
def gradients(name):
    """Compiled once, whatever the pictures."""
    make, augment = NETWORKS[name]
    return PaddedGradients(AnyNetwork(make), DEVICE, torch.bfloat16, augment, at_once=AT_ONCE)


class Sums:
    """Clipped sums of alike examples, whose gradients add up, at places of our choice; always of one program."""

    def __init__(self, name, offset):
        augment = NETWORKS[name][1]
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(COUNT, 3, 32, 32, generator=generator)
        self.images = (images[:1] + 0.01 * images + offset).to(DEVICE)
        self.labels = torch.full((COUNT,), 3, device=DEVICE)
        self.views = None
        if augment is not None:
            numbers = torch.arange(COUNT * augment.views, device=DEVICE).view(COUNT, -1)
            run, step = (
                torch.zeros(COUNT, dtype=torch.int32, device=DEVICE),
                torch.zeros((), dtype=torch.int64, device=DEVICE),
            )
            self.views = augment.choice(Streams([9], DEVICE).words(run, numbers, step, VIEWS))
        self.gradients = gradients(name)
        self.theta = self.gradients.network.initial(0).unsqueeze(0).to(DEVICE)
        self.bound = torch.full((1,), BOUND, device=DEVICE)

    def at(self, places):
        """With these examples at the places 0, 1, …; COUNT leaves one empty. The rest is empty too."""
        full = torch.full((1, -(-COUNT // AT_ONCE) * AT_ONCE), COUNT)
        full[0, : len(places)] = torch.as_tensor(places)
        none = torch.zeros(0, device=DEVICE)
        batch = Batch(self.images, self.labels, none, none, full.to(DEVICE), none, self.views)
        return self.gradients.clipped_sums(self.theta, batch, self.bound)[0]

    def without(self, gone):
        return self.at([COUNT if i == gone else i for i in range(COUNT)])

    def alone(self, example, place):
        return self.at([COUNT] * place + [example])

    def by_tensor(self, difference):
        """Where a difference is, in units of C, largest first."""
        sizes = {n.removeprefix("model."): p.numel() for n, p in self.gradients.params.items()}
        norms = {n: float(d.norm()) / BOUND for n, d in zip(sizes, difference.split(list(sizes.values())), strict=True)}
        return ", ".join(f"{n} {v:.2e}" for n, v in sorted(norms.items(), key=lambda item: -item[1]))


@functools.cache
def sums(name, offset):
    return Sums(name, offset)


@functools.cache
def whole(name, offset):
    return sums(name, offset).at(range(COUNT))


every_network = pytest.mark.parametrize("name", NETWORKS)
offsets = pytest.mark.parametrize("offset", [0.0, 30.0, 300.0])


# ---- what the guarantee needs


@every_network
@offsets
def test_an_example_that_leaves_its_place_empty_moves_the_sum_by_at_most_c(name, offset):
    of, told, norms = sums(name, offset), [], []
    for gone in GONE:
        share, alone = whole(name, offset) - of.without(gone), of.alone(gone, gone)
        norms.append(float(share.norm()) / BOUND)
        told.append(f"without {gone}: moved by {norms[-1]:.8f} C, alone it counts {float(alone.norm()) / BOUND:.8f} C")
        told.append(f"between the two: {of.by_tensor(share - alone)}")
    assert all(0.5 < moved <= 1 + 1e-5 for moved in norms), "\n".join(told)


@every_network
@offsets
def test_an_examples_share_does_not_depend_on_its_company(name, offset):
    """To the rounding of sums over 64 examples in fp32."""
    of = sums(name, offset)
    for gone in GONE:
        difference = whole(name, offset) - of.without(gone) - of.alone(gone, gone)
        assert float(difference.norm()) < 5e-5 * BOUND, f"without {gone}: {of.by_tensor(difference)}"


@every_network
def test_the_norm_that_was_measured_is_the_norm_of_what_is_added(name):
    """A single example, clipped to C: its share has the norm C to the digits of fp32, so its factor was made of its norm."""
    of = sums(name, 30.0)
    for place in (0, 1, 200):
        off = float(of.alone(7, place).norm()) / BOUND - 1
        assert abs(off) < 1e-5, f"at place {place}: {off:+.2e} of C"


@every_network
@offsets
def test_the_same_batch_twice_gives_the_same_sum_bit_for_bit(name, offset):
    again = sums(name, offset).at(range(COUNT))
    difference = again - whole(name, offset)
    assert torch.equal(again, whole(name, offset)), sums(name, offset).by_tensor(difference)


# ---- what it does not need


@every_network
@offsets
@may_depend_on_the_place
def test_an_example_counts_the_same_at_every_place(name, offset):
    of = sums(name, offset)
    first, told = of.alone(7, 0), []
    for place in (1, 2, 63, 64, 127, 128, 200, 512):
        difference = of.alone(7, place) - first
        if float(difference.norm()) > 1e-6 * BOUND:
            told.append(f"at place {place}: {float(difference.norm()) / BOUND:.2e} C, of it {of.by_tensor(difference)}")
    assert not told, "\n".join(told)


@every_network
@offsets
@may_depend_on_the_place
def test_packed_in_order_an_example_would_still_move_the_sum_by_at_most_c(name, offset):
    """What stacks did before they drew places: everyone after the missing example moves up."""
    of, told = sums(name, offset), []
    for gone in GONE:
        moved = whole(name, offset) - of.at([i for i in range(COUNT) if i != gone])
        others = moved - (whole(name, offset) - of.without(gone))
        if float(moved.norm()) > BOUND * (1 + 1e-5):
            told.append(f"without {gone}: {float(moved.norm()) / BOUND - 1:+.2e} C; others: {of.by_tensor(others)}")
    assert not told, "\n".join(told)


CONVOLUTIONS = [(3, 32, 32), (32, 64, 16), (64, 64, 16), (64, 128, 8), (128, 128, 8)]  # CompactCNN's


@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last], ids=["channels first", "channels last"]
)
@pytest.mark.parametrize("way", ["forward", "backward"])
@may_depend_on_the_place
def test_a_convolution_of_the_library_is_the_same_at_every_place(shape, layout, way):
    into, out, side = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3 * AT_ONCE, into if way == "forward" else out, side, side, generator=generator) + 30.0
    w = torch.randn(out, into, 3, 3, generator=generator) / (3 * into**0.5)
    x, w = (t.to(DEVICE, torch.bfloat16).contiguous(memory_format=layout) for t in (x, w))

    def run(rows):
        if way == "forward":
            return torch.nn.functional.conv2d(rows, w, padding=1)
        return torch.nn.grad.conv2d_input((len(rows), into, side, side), w, rows, padding=1)

    for by in (1, 3, 64):
        moved = x.roll(by, 0).contiguous(memory_format=layout)
        different = (run(moved) != run(x).roll(by, 0)).flatten(1).sum(1)
        assert not bool(different.any()), (
            f"moved by {by}: {int(different.sum())} numbers in {int((different > 0).sum())} rows"
        )
