"""Views of pictures in stacks: averaged before clipping, drawn from the run's own stream, in parts or at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpivon
from dpivon import ArgumentError, Augmentation
from dpivon.models import CompactCNN, PaperCNN
from dpivon.privacy.augmentation import of_every_view
from dpivon.privacy.kernels.padded import PaddedGradients, examples_at_once, footprint
from dpivon.privacy.kernels.paper.layout import Layout
from dpivon.privacy.kernels.reference import LoopedGradients
from dpivon.privacy.layers import conv, groups
from dpivon.privacy.layers.uses import Dense, Outer
from dpivon.privacy.streams import VIEWS, Streams, philox
from dpivon.stacked import AnyNetwork, PaperNetwork, Run, Stack
from dpivon.stacked.checkpoint import StackCheckpoints

FOUR = Augmentation(4, flip=True, crop=2)
RUNS = [
    Run("dp-sgd", 11, 1.0, 0.05, 0.1, 12),
    Run("dp-adam", 12, 2.0, 0.3, 0.01, 6),
    Run("dp-sgd", 13, 1.0, 100.0, 0.1, 1),  # often an empty batch, and never clipped
]


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 3, 8, 8, generator=generator), torch.randint(0, 10, (40,), generator=generator)


def build():
    return CompactCNN(widths=(4, 8), depths=(1, 2), groups=2)


def stack_of(data, runs=RUNS, augment=FOUR, network=None, **options):
    return Stack(runs, network or AnyNetwork(build), *data, augment=augment, **options)


def trained(stack, steps=4):
    for _ in stack.train(steps):
        pass
    return stack


# ---- one view


def by_hand(image, flip, down, right, crop, padding):
    """Turn the picture round or not, pad it, cut out."""
    mode = {"reflect": "reflect", "zeros": "constant"}[padding]
    margin = F.pad((image.flip(2) if flip else image)[None], (crop,) * 4, mode=mode)[0]
    h, w = image.shape[1:]
    return margin[:, down : down + h, right : right + w]


@pytest.mark.parametrize("padding", ["reflect", "zeros"])
def test_a_view_is_a_crop_out_of_the_padded_picture(padding):
    images, augment = torch.randn(2, 3, 6, 7), Augmentation(18, flip=True, crop=1, padding=padding)
    every = torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(3))  # flip, down, right
    views = augment.apply(images, every.expand(2, -1, -1)).unflatten(0, (2, 18))
    for image, found in zip(images, views, strict=True):
        for (flip, down, right), view in zip(every.tolist(), found, strict=True):
            expected = by_hand(image, flip, down, right, 1, padding)
            torch.testing.assert_close(view, expected, rtol=0, atol=0)


def test_choices_are_uniform_and_independent():
    streams = Streams([5, 6], torch.device("cpu"))
    element = torch.arange(40_000).view(-1, 4)
    choice = FOUR.choice(streams.words(torch.arange(10_000) % 2, element, torch.tensor(3), VIEWS)).flatten(0, 1)
    table = choice[:, 0] * 25 + choice[:, 1] * 5 + choice[:, 2]
    counts = torch.bincount(table, minlength=50).double()
    assert len(counts) == 50
    expected = 40_000 / 50
    assert float((counts - expected).square().sum() / expected) < 49 + 5 * (2 * 49) ** 0.5  # χ²


def test_words_are_those_of_philox():
    seeds = [3, 2**62 + 12345]
    streams, element = Streams(seeds, torch.device("cpu")), torch.tensor([[0, 7, 2**32 - 1], [5, 6, 123456789]])
    found = streams.words(torch.tensor([1, 0], dtype=torch.int32), element, torch.tensor(41), VIEWS)
    for row, seed in enumerate((seeds[1], seeds[0])):
        expected = philox(seed, element[row].numpy(), 41, VIEWS)
        for word, known in zip(found, expected, strict=True):
            assert word[row].tolist() == known.tolist()


# ---- sums


def reference(network, row, batch, k, bound, augment):
    """In double, example by example: the mean over views of the gradient, clipped, added up."""
    model = network.model(row).double()
    begin, end = int(batch.start[k]), int(batch.start[k + 1])
    total = torch.zeros(row.shape, dtype=torch.float64)
    for i in range(begin, end):
        mean = torch.zeros_like(total)
        for view in augment.apply(batch.inputs[i : i + 1].double(), batch.views[i : i + 1]):
            loss = F.cross_entropy(model(view[None]), batch.labels[i : i + 1])
            found = torch.autograd.grad(loss, list(model.parameters()))
            mean += torch.cat([g.flatten() for g in found]) / augment.views
        total += mean * min(1.0, bound / (float(mean.norm()) + 1e-6))
    return total


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("augment", [FOUR, Augmentation(3, crop=3, padding="zeros"), Augmentation(1, flip=True)])
def test_the_mean_over_views_is_clipped_and_nothing_else(data, augment):
    stack = stack_of(data, runs=RUNS[::2], augment=augment)
    ways = {
        "loop": stack.gradients,
        "traced, in parts": PaddedGradients(stack.network, stack.device, torch.float32, augment, at_once=5),
    }
    assert isinstance(stack.gradients, LoopedGradients)
    for part in stack.sampler.parts(1):
        batch, theta = stack._batch(*part), stack._theta()
        bounds = stack.mechanism.bound
        expected = [reference(stack.network, theta[k], batch, k, float(bounds[k]), augment) for k in range(2)]
        for name, way in ways.items():
            got = way.clipped_sums(theta, batch, bounds)
            assert got.dtype == torch.float64
            torch.testing.assert_close(got, torch.stack(expected), rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.slow
def test_views_in_bf16_are_added_up_before_they_are_made(data, monkeypatch):
    """As on a GPU: gradients of a convolution are made of an example's views together, not of each; the sums are the same."""
    stack = stack_of(data, runs=RUNS[:1])
    batch, theta, bound = stack._batch(*stack.sampler.parts(0)[0]), stack._theta(), stack.mechanism.bound

    def both():
        ways = (
            LoopedGradients(stack.network, torch.bfloat16, FOUR),
            PaddedGradients(stack.network, stack.device, torch.bfloat16, FOUR),
        )
        return [way.clipped_sums(theta, batch, bound) for way in ways]

    made, settled = [], groups.settled
    monkeypatch.setattr(groups, "settled", lambda use: made.append((use, settled(use))) or made[-1][1])
    together = both()
    convolutions = [(a, b) for a, b in made if getattr(a, "order", None) is not None]
    assert len(convolutions) >= 6
    assert all(isinstance(a, Outer) and isinstance(b, Dense) for a, b in convolutions)
    monkeypatch.setattr(conv, "rows_of_an_example", lambda: 1)
    for a, b in zip(together, both(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    wide = stack.gradients.clipped_sums(theta, batch, bound)
    assert 0 < float((together[0] - wide).norm() / wide.norm()) < 0.1


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_no_example_moves_the_sum_by_more_than_c_whatever_its_views(data, dtype, offset):
    """Coherent gradients of shifted pictures; one example's views point all one way, another's cancel."""
    images, labels = data
    images, labels = images[:1] + 0.01 * images + offset, labels[:1].expand(40).contiguous()
    images[3] = 1e4 * images[3]
    images[5, :, :, :4] = 40.0
    stack = Stack([Run("dp-sgd", 1, 1.0, 0.1, 0.1, 40)], AnyNetwork(build), images, labels, augment=FOUR)
    whole = stack._batch(*stack.sampler.parts(0)[0])
    rows, theta, bound = int(whole.start[1]), stack._theta(), stack.mechanism.bound
    assert rows == 40
    for gradients in (
        LoopedGradients(stack.network, dtype, FOUR),
        PaddedGradients(stack.network, stack.device, dtype, FOUR, at_once=16),
    ):
        total = gradients.clipped_sums(theta, whole, bound)
        moves = []
        for gone in (0, 3, 5, 39):
            mask = torch.ones(1, 40, dtype=torch.int8)
            mask[0, gone] = 0
            stack.streams.poisson = lambda *a, mask=mask: mask.unsqueeze(0)
            (part,) = stack.sampler.parts(0)
            fewer = stack._batch(*part)
            moves.append(float((total - gradients.clipped_sums(theta, fewer, bound)).norm()))
        assert max(moves) <= 0.1 * (1 + 1e-5)
        assert max(moves) > 0.05  # clipping is in force


def test_clipping_every_view_by_itself_would_be_seen(data):
    """The bug that the test above is for: four rows that are taken for four examples move the sum by nearly 4 C."""
    images, labels = data
    alike = images[:1].mean((2, 3), keepdim=True).expand(40, -1, 8, 8) + 0.01 * images
    stack = Stack([Run("dp-sgd", 1, 1.0, 0.1, 0.1, 40)], AnyNetwork(build), alike, labels[:1].expand(40), augment=FOUR)
    batch, theta = stack._batch(*stack.sampler.parts(0)[0]), stack._theta()
    one = type(batch)(**(vars(batch) | {"start": torch.tensor([0, 1], dtype=torch.int32)}))
    right, wrong = (LoopedGradients(stack.network, torch.float32, FOUR) for _ in range(2))
    wrong.views = 1
    moves = [float(way.clipped_sums(theta, one, stack.mechanism.bound).norm()) for way in (right, wrong)]
    assert moves[0] <= 0.1 * (1 + 1e-5)
    assert moves[1] > 0.3


def test_a_view_that_is_not_finite_strikes_its_example_and_no_other(data):
    images, labels = data[0].clone(), data[1]
    images[7, :, 0, 0] = float("nan")  # in the corner: some views have cropped it away
    stack = stack_of((images, labels), runs=[Run("dp-sgd", 1, 1.0, 1.0, 0.1, 40)])
    batch = stack._batch(*stack.sampler.parts(0)[0])
    sums = stack.gradients.clipped_sums(stack._theta(), batch, stack.mechanism.bound)
    assert torch.isfinite(sums).all()


@pytest.mark.slow
def test_taking_a_batch_in_parts_changes_nothing_but_rounding(data):
    """With and without views; parts that are filled, and parts that are not."""
    for augment in (None, FOUR):
        stack = stack_of(data, runs=RUNS[:1], augment=augment)
        batch, theta, bound = stack._batch(*stack.sampler.parts(0)[0]), stack._theta(), stack.mechanism.bound
        most = batch.places.shape[1]
        whole = PaddedGradients(stack.network, stack.device, torch.float32, augment, at_once=most)
        assert whole._parts(batch)[0] is batch.places  # as it was before there were parts
        expected = whole.clipped_sums(theta, batch, bound)
        for at_once in (7, most - 1):
            gradients = PaddedGradients(stack.network, stack.device, torch.float32, augment, at_once=at_once)
            parts = gradients._parts(batch)
            assert len({p.shape for p in parts}) == 1  # one program
            assert parts[0].shape[1] <= at_once
            assert sorted(torch.cat(list(parts), 1)[0].tolist())[:most] == sorted(batch.places[0].tolist())
            torch.testing.assert_close(gradients.clipped_sums(theta, batch, bound), expected, rtol=1e-5, atol=1e-6)


def test_all_parts_of_the_first_batch_have_the_program_of_later_ones(data, monkeypatch):
    """Two programs for one thing may round otherwise, and a compiler would be asked twice."""
    stack = stack_of(data, runs=[RUNS[0], replace(RUNS[0], seed=99)])
    batch, bound = stack._batch(*stack.sampler.parts(0)[0]), stack.mechanism.bound
    gradients = PaddedGradients(stack.network, stack.device, torch.float32, at_once=7)
    assert len(gradients._parts(batch)) > 2
    traces, trace = [], PaddedGradients._trace
    monkeypatch.setattr(PaddedGradients, "_trace", lambda self, *args: traces.append(1) or trace(self, *args))
    gradients.clipped_sums(stack._theta(), batch, bound)
    assert len(traces) == 1


def test_parts_are_filled_to_whole_blocks_where_memory_allows(data):
    stack = stack_of(data)
    batch = stack._batch(*stack.sampler.parts(0)[0])
    gradients = PaddedGradients(stack.network, stack.device, torch.float32, at_once=896)
    long = type(batch)(**(vars(batch) | {"places": torch.zeros(1, 4300, dtype=torch.int64)}))
    assert [p.shape[1] for p in gradients._parts(long)] == [896] * 5


def test_room_is_counted_from_what_layers_make():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 10))
    counted = footprint(model, torch.zeros(5, 3, 8, 8))
    assert counted.activations == 8 * 36 + 8 * 36 + 10
    assert counted.unfolded == 36 * 27 + 8 * 36
    assert counted.largest == 8 * 27  # one position of a linear layer is never materialised
    assert footprint(model, torch.zeros(5, 3, 8, 8), views=2).largest == 2880
    few, many = (examples_at_once(CompactCNN(), torch.zeros(1, 3, 32, 32), views) for views in (1, 16))
    assert few > 8 * many > 0


# ---- runs


def test_a_run_with_views_in_a_stack_equals_the_same_run_alone_and_an_overflowing_one(data):
    together = trained(stack_of(data, block=3))
    for i, run in enumerate(RUNS):
        alone = trained(stack_of(data, runs=[run]))
        torch.testing.assert_close(together.mean[together._row(i)], alone.mean[0], rtol=1e-5, atol=1e-6)
    tight = stack_of(data)
    tight.sampler.capacity, tight.sampler.most = 12, 5
    original, parts = tight._step_in_parts, []
    tight._step_in_parts = lambda own: (parts.append(len(own)), original(own))
    torch.testing.assert_close(trained(tight).mean, together.mean, rtol=1e-5, atol=1e-6)
    assert parts


def test_every_step_draws_new_views(data):
    stack = stack_of(data)
    index, model = torch.arange(40), torch.zeros(40, dtype=torch.int32)
    first = stack._views(index, model)
    assert torch.equal(first, stack._views(index, model))
    assert torch.equal(first[5:9], stack._views(index[5:9], model[5:9]))  # whoever else is drawn
    assert not torch.equal(first, stack._views(index, model + 1))
    stack._at += 1
    assert not torch.equal(first, stack._views(index, model))


def test_one_view_as_it_is_is_the_old_path(data):
    plain, one = stack_of(data, augment=None), stack_of(data, augment=Augmentation())
    assert one.augment is None
    assert one._batch(*one.sampler.parts(0)[0]).views is None
    assert torch.equal(trained(plain).mean, trained(one).mean)
    # and a batch that is augmented is another one
    assert not torch.allclose(plain.mean, trained(stack_of(data)).mean)


def test_views_that_are_all_alike_change_nothing(data):
    plain, alike = stack_of(data, augment=None), stack_of(data, augment=Augmentation(3))
    assert alike.augment is not None
    torch.testing.assert_close(trained(alike).mean, trained(plain).mean, rtol=1e-4, atol=1e-6)


def test_a_resumed_run_repeats_its_views(data, tmp_path):
    whole = trained(stack_of(data, block=2), 6)
    first = stack_of(data, block=2)
    kept = StackCheckpoints(first, tmp_path)
    kept.restore()
    trained(first, 2)
    kept.save({})
    trained(first, 2)  # lost
    kept.close()
    again = stack_of(data, block=2)
    kept = StackCheckpoints(again, tmp_path)
    kept.restore()
    assert again.steps_done == 2
    trained(again, 4)
    kept.close()
    assert torch.equal(again.mean, whole.mean)
    other = StackCheckpoints(stack_of(data, block=2, augment=Augmentation(2, flip=True)), tmp_path)
    with pytest.raises(ArgumentError, match="of other runs"):
        other.restore()
    other.close()


def test_fit_takes_views(data):
    images, labels = data
    known = {
        "lr": 0.1,
        "batch_size": 10,
        "epochs": 1,
        "delta": 1e-3,
        "noise_multiplier": 1.0,
        "method": "dp-sgd",
        "seed": 3,
    }
    torch.manual_seed(0)
    model = build()
    fitted = dpivon.fit(model, images, labels, augment=FOUR, **known)
    plain = dpivon.fit(model, images, labels, **known)
    assert fitted.epsilon == plain.epsilon  # views cost nothing
    run = Run("dp-sgd", 3, 1.0, 1.0, 0.1, 10)
    network = AnyNetwork(build)
    stack = Stack([run], network, images, labels, augment=FOUR, start=network.pack(model).unsqueeze(0))
    assert torch.equal(network.pack(fitted.model), trained(stack, 4).mean[0])


def test_the_papers_network_gets_views_without_its_kernels(data):
    from dpivon.stacked.networks import cross_entropy, network_for

    assert isinstance(network_for(PaperCNN(), cross_entropy), PaperNetwork)
    assert type(network_for(PaperCNN(), cross_entropy, FOUR)) is AnyNetwork
    network = PaperNetwork(Layout(image=16, widths=(8, 8, 16), hidden=16, groups=4))
    assert isinstance(network.gradients(1, 4, torch.device("cpu"), torch.float32, FOUR), LoopedGradients)
    with pytest.raises(ArgumentError, match=r"augment=.*views=4.*kernels.*Use AnyNetwork\(network.build\)"):
        network.gradients(1, 4, torch.device("cuda"), torch.float32, FOUR)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"views": 0}, "views=0"),
        ({"views": 2.5}, "views=2.5"),
        ({"flip": "yes"}, "flip='yes'"),
        ({"crop": -1}, "crop=-1"),
        ({"padding": "edge"}, "padding='edge'"),
    ],
)
def test_what_makes_no_views_is_refused_by_name(wrong, words):
    with pytest.raises(ArgumentError, match=words):
        Augmentation(**wrong)


def test_numbers_are_whole_whatever_their_kind():
    assert repr(Augmentation(4.0, crop=2.0)) == repr(Augmentation(4, crop=2))


def test_views_are_of_pictures_larger_than_the_crop(data):
    with pytest.raises(ArgumentError, match=r"augment=.*shape \(40, 192\)"):
        Stack(RUNS, AnyNetwork(lambda: nn.Linear(192, 10)), data[0].flatten(1), data[1], augment=FOUR)
    with pytest.raises(ArgumentError, match="crop=8"):
        stack_of(data, augment=Augmentation(2, crop=8))


def test_labels_follow_their_views():
    labels = torch.tensor([3, 1])
    assert of_every_view(labels, Augmentation(3)).tolist() == [3, 3, 3, 1, 1, 1]
    shares = torch.eye(2)
    assert torch.equal(of_every_view(shares, Augmentation(2)), shares.repeat_interleave(2, 0))
    assert of_every_view(labels, None) is labels
