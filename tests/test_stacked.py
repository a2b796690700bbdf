"""Stacked runs against the same runs alone, and against torch's optimizers on the same released gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpivon import PrivacyError, budget
from dpivon.models import StandardisedConv2d
from dpivon.privacy.kernels.padded import PaddedGradients
from dpivon.privacy.kernels.paper.layout import Layout
from dpivon.privacy.kernels.reference import Batch
from dpivon.stacked import AnyNetwork, PaperNetwork, Run, Stack, register_program

LAYOUT = Layout(image=16, widths=(8, 8, 16), hidden=16, groups=4)


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(60, 3, 16, 16, generator=generator)
    return images, torch.randint(0, 10, (60,), generator=generator)


RUNS = [
    Run("dp-ivon-gradsq", 11, 1.0, 2.0, 0.5, 8),
    Run("dp-sgd", 12, 0.5, 1.0, 0.1, 16),
    Run("dp-adam", 13, 2.0, 0.5, 0.01, 4),
    Run("dp-ivon-gradsq", 14, 5.0, 1.0, 0.1, 12, {"ess": 500.0, "hess_init": 0.5}),
    Run("dp-sgd", 15, 1.0, 1.0, 0.1, 1),  # often an empty batch
]


def trained(runs, data, steps=5, **options):
    stack = Stack(runs, PaperNetwork(LAYOUT), *data, **options)
    for _ in stack.train(steps):
        pass
    return stack


def test_a_run_in_a_stack_equals_the_same_run_alone(data):
    together = trained(RUNS, data, block=3)
    for i, run in enumerate(RUNS):
        alone = trained([run], data)
        for a, b in zip(together.model(i).parameters(), alone.model(0).parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        for name, v in alone.posterior(0).variance.items():
            torch.testing.assert_close(together.posterior(i).variance[name], v, rtol=1e-5, atol=0)


def test_a_caller_in_autocast_changes_nothing(data):
    """Norms and sums were rounded to bf16 apart, so that one example could move a sum by 1.001 C."""
    outside = trained(RUNS[:2], data)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = trained(RUNS[:2], data)
    assert torch.equal(inside.mean, outside.mean)


def test_one_seed_from_two_starts_is_refused(data):
    """Alike but for their first weights they had the same noise on different sums: their difference was without any."""
    network = PaperNetwork(LAYOUT)
    start = torch.stack([network.initial(1), network.initial(2)])
    with pytest.raises(ValueError, match=r"seed=11: belongs to two different runs, which would share their noise\."):
        Stack([RUNS[0]] * 2, network, *data, start=start)
    assert len(Stack([RUNS[0]] * 2, network, *data, start=start[:1].expand(2, -1)).runs) == 2


def test_runs_differ_from_each_other_by_their_seed_alone(data):
    twins = [Run("dp-sgd", seed, 1.0, 1.0, 0.1, 8) for seed in (1, 1, 2)]
    stack = trained(twins, data)
    assert torch.equal(stack.mean[0], stack.mean[1])
    assert not torch.allclose(stack.mean[0], stack.mean[2])


def test_every_run_is_charged_for_its_own_releases(data):
    stack = trained(RUNS, data, steps=7, block=3)
    for i, run in enumerate(RUNS):
        expected = budget(
            dataset_size=60, batch_size=run.batch_size, steps=7, delta=1e-3, noise_multiplier=run.noise_multiplier
        )
        assert stack.epsilon(i, 1e-3) == expected.epsilon


def test_a_block_is_charged_before_it_is_launched(data):
    stack = Stack(RUNS, PaperNetwork(LAYOUT), *data, block=4)
    stack._launch = lambda: (_ for _ in ()).throw(RuntimeError("the machine died"))
    with pytest.raises(RuntimeError, match="died"):
        next(stack.train(10))
    assert all(len(a) == 4 for a in stack.mechanism.accountants)


def test_a_step_that_overflows_its_capacity_is_run_in_parts_not_cut(data):
    whole = trained(RUNS, data)
    tight = Stack(RUNS, PaperNetwork(LAYOUT), *data)
    tight.sampler.capacity, tight.sampler.most = 40, 9
    parts = []
    original = tight._step_in_parts
    tight._step_in_parts = lambda own: (parts.append(len(own)), original(own))
    for _ in tight.train(5):
        pass
    assert parts  # it did overflow
    torch.testing.assert_close(tight.mean, whole.mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["dp-sgd", "dp-adam"])
def test_rules_are_those_of_torch_given_the_same_released_gradients(data, method):
    stack = Stack([Run(method, 3, 1.0, 1.0, 0.05, 8)], PaperNetwork(LAYOUT), *data)
    start = stack.mean[0].clone()
    released = []
    release = stack.mechanism.release
    stack.mechanism.release = lambda *args: released.append(release(*args)) or released[-1]
    for _ in stack.train(6):
        pass
    p = nn.Parameter(start)
    optimizer = (
        torch.optim.SGD([p], 0.05, momentum=0.9, weight_decay=1e-4)
        if method == "dp-sgd"
        else torch.optim.Adam([p], 0.05, weight_decay=1e-4)
    )
    for g in released:
        p.grad = g[0]
        optimizer.step()
    torch.testing.assert_close(stack.mean[0], p.detach(), rtol=1e-5, atol=1e-6)


def test_ivon_rows_are_the_optimizer_given_the_same_released_gradients_and_samples(data):
    from dpivon import IVON, Release

    run = Run("dp-ivon-gradsq", 3, 1.0, 1.0, 0.3, 8)
    stack = Stack([run], PaperNetwork(LAYOUT), *data)
    p = nn.Parameter(stack.mean[0].clone())
    optimizer = IVON([p], lr=0.3, ess=60, rescale_lr=False)
    optimizer.bind_to_releases()
    original = stack._update

    def update(sums):
        g = stack.mechanism.release(sums, stack._t)[0]
        optimizer.step(release=Release({p: g}, float(stack.mechanism.variance)))
        original(sums)

    stack._update = update
    for _ in stack.train(6):
        pass
    torch.testing.assert_close(stack.mean[0], p.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(stack.parts[0].state["hess"][0], optimizer.state[p]["hess"], rtol=1e-5, atol=0)


def test_batches_are_poisson_and_independent_between_runs(data):
    stack = Stack([Run("dp-sgd", s, 1.0, 1.0, 0.1, 15) for s in range(20)], PaperNetwork(LAYOUT), *data)
    mask = stack.streams.poisson(60, stack.sampler.rates, 0, 100).double()  # [100, 20, 60], q = .25
    n = mask.numel()
    assert abs(float(mask.mean()) - 0.25) < 5 * (0.25 * 0.75 / n) ** 0.5
    sizes = mask.sum(2)
    variance = 60 * 0.25 * 0.75
    assert abs(float(sizes.var()) / variance - 1) < 5 * (2 / sizes.numel()) ** 0.5
    a, b = mask[:, 0].flatten() - 0.25, mask[:, 1].flatten() - 0.25
    assert abs(float((a * b).mean())) < 5 * 0.1875 / len(a) ** 0.5
    a, b = mask[:-1].flatten() - 0.25, mask[1:].flatten() - 0.25
    assert abs(float((a * b).mean())) < 5 * 0.1875 / len(a) ** 0.5


def test_packed_batches_hold_exactly_the_drawn_examples(data):
    stack = Stack(RUNS, PaperNetwork(LAYOUT), *data)
    block = stack.sampler.draw(4, 3)
    mask = stack.streams.poisson(60, stack.sampler.rates, 4, 3)
    for j in range(3):
        for k in range(len(RUNS)):
            begin, end = int(block.start[j, k]), int(block.start[j, k + 1])
            members = mask[j, k].nonzero().flatten()
            assert torch.equal(block.index[j, begin:end], members)
            assert (block.model[j, begin:end] == k).all()
            places = block.places[j, k]
            assert places[places < stack.sampler.capacity].sort().values.tolist() == list(range(begin, end))
            assert torch.equal(block.places[j].flatten()[block.seats[j, begin:end]], torch.arange(begin, end))


def test_a_diverging_run_leaves_the_others_alone(data):
    runs = [Run("dp-sgd", 1, 1.0, 1.0, 1e30, 8), Run("dp-sgd", 2, 1.0, 1.0, 0.1, 8)]
    stack = trained(runs, data)
    assert not torch.isfinite(stack.mean[0]).all()
    torch.testing.assert_close(stack.mean[1], trained(runs[1:], data).mean[0])


def test_any_network_of_layers_with_rules_can_be_stacked(data):
    def build():
        return nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 10))

    stack = Stack(RUNS, AnyNetwork(build), *data)
    for _ in stack.train(3):
        pass
    alone = Stack(RUNS[:1], AnyNetwork(build), *data)
    for _ in alone.train(3):
        pass
    torch.testing.assert_close(stack.mean[stack._row(0)], alone.mean[0])


class Words(nn.Module):
    """Embedding, bare positions, attention and a shared layer: what images do not need."""

    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(16, 8), nn.Parameter(0.1 * torch.randn(1, 12, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.twice, self.head = nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x):
        tokens = x.flatten(1)[:, :12].nan_to_num(0).mul(4).long().clamp(0, 15)
        z = self.encoder(self.embedding(tokens) + self.position).mean(1) + x.flatten(1)[:, :8]
        return self.head(self.twice(torch.tanh(self.twice(z))))


NETWORKS = {
    "images": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4 * 196, 10)),
    "words": Words,
    "standardised": lambda: nn.Sequential(StandardisedConv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 196, 10)),
}


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_traced_program_of_any_network_gives_the_sums_of_the_loop(data, name):
    """What a GPU compiles and captures, here on the CPU; with a non-finite example, and empty batches."""
    images, labels = data[0].clone(), data[1]
    images[7] = float("nan")
    stack = Stack(RUNS, AnyNetwork(NETWORKS[name]), images, labels)
    traced = PaddedGradients(stack.network, stack.device, torch.float32)
    empty = dropped = 0
    for step in range(6):
        for part in stack.sampler.parts(step):
            batch = stack._batch(*part)
            empty += int((batch.start.diff() == 0).sum())
            dropped += int(torch.isnan(batch.inputs[: int(batch.start[-1])]).flatten(1).any(1).sum())
            theta = stack._theta() + 0.01 * step  # the program must read it, not what it was traced with
            expected = stack.gradients.clipped_sums(theta, batch, stack.mechanism.bound)
            got = traced.clipped_sums(theta, batch, stack.mechanism.bound)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert empty > 0
    assert dropped > 0


def test_the_traced_program_hears_of_another_bound(data):
    """The bound is a constant of the compiled program: another one, or the same tensor changed, must not find the old."""
    stack = Stack(RUNS, AnyNetwork(NETWORKS["images"]), *data)
    traced = PaddedGradients(stack.network, stack.device, torch.float32)
    batch, theta, bound = stack._batch(*stack.sampler.parts(0)[0]), stack._theta(), stack.mechanism.bound.clone()

    def both():
        return traced.clipped_sums(theta, batch, bound), stack.gradients.clipped_sums(theta, batch, bound)

    first, expected = both()
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)
    bound /= 100  # in place
    smaller, expected = both()
    torch.testing.assert_close(smaller, expected, rtol=1e-5, atol=1e-6)
    assert float(smaller.norm()) < 0.5 * float(first.norm())
    bound = stack.mechanism.bound  # another tensor
    torch.testing.assert_close(both()[0], first, rtol=0, atol=0)


def test_a_captured_step_refuses_another_bound(data):
    """As after a capture, without a GPU."""

    class Graph:
        replayed = 0

        def replay(self):
            self.replayed += 1

    stack = Stack(RUNS, AnyNetwork(NETWORKS["images"]), *data)
    stack._replay.graph = Graph()
    stack._captured_bound = id(stack.mechanism.bound), stack.mechanism.bound._version
    stack._launch()
    stack.mechanism.bound *= 2
    with pytest.raises(PrivacyError, match=r"max_grad_norm=.*changed after the step was captured.*new Stack"):
        stack._launch()
    assert stack._replay.graph.replayed == 1


def test_layout_is_a_rearrangement_and_nothing_else():
    network = PaperNetwork(LAYOUT)
    row = network.initial(5)
    assert row.numel() == LAYOUT.size == sum(p.numel() for p in network.model(row).parameters())
    assert torch.equal(network.pack(network.model(row)), row)
    assert PaperNetwork().size == 357_258


def test_dropped_examples_count_for_nothing(data):
    images, labels = data[0].clone(), data[1]
    network = PaperNetwork(LAYOUT)
    theta = network.initial(0).unsqueeze(0)

    def sums(rows):
        n = len(rows)
        start = torch.tensor([0, n], dtype=torch.int32)
        batch = Batch(
            images[rows],
            labels[rows],
            torch.zeros(n, dtype=torch.int32),
            start,
            torch.arange(n).unsqueeze(0),
            torch.arange(n),
        )
        return network.gradients(1, n, torch.device("cpu"), torch.float32).clipped_sums(theta, batch, torch.ones(1))

    expected = sums(torch.tensor([0, 1, 3]))
    images[2] = float("nan")
    torch.testing.assert_close(sums(torch.tensor([0, 1, 2, 3])), expected)


def test_a_block_that_failed_midway_is_continued_with_fresh_batches(data):
    whole = trained(RUNS[:2], data, steps=5)
    stack = Stack(RUNS[:2], PaperNetwork(LAYOUT), *data)
    sums, calls = stack.gradients.clipped_sums, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError
        return sums(*args)

    stack.gradients.clipped_sums = failing
    with pytest.raises(MemoryError):
        list(stack.train(5))
    list(stack.train(3))  # two were made
    assert stack.steps_done == 5
    torch.testing.assert_close(stack.mean, whole.mean, rtol=0, atol=0)


def test_two_different_runs_may_not_share_their_noise(data):
    runs = [Run("dp-sgd", 1, 1.0, 1.0, lr, 8) for lr in (0.1, 0.2)]
    with pytest.raises(ValueError, match="share their noise"):
        Stack(runs, PaperNetwork(LAYOUT), *data)


@pytest.mark.parametrize("option", [{"block": 0}, {"block": -3}, {"dataset_size": 0}])
def test_sizes_are_checked(data, option):
    with pytest.raises(ValueError, match=next(iter(option))):
        Stack(RUNS, PaperNetwork(LAYOUT), *data, **option)


def test_rates_and_bounds_are_never_rounded_up(data):
    runs = [Run("dp-sgd", i, 1.0, 0.1 * i, 0.1, i) for i in range(1, 30)]
    stack = Stack(runs, PaperNetwork(LAYOUT), *data)
    for run, rate, bound in zip(runs, stack.sampler.rates.tolist(), stack.mechanism.bound.tolist(), strict=True):
        assert rate <= run.batch_size / 60 * 2**32 < rate + 1
        assert run.max_grad_norm * (1 - 2e-7) < bound <= run.max_grad_norm


def test_a_network_that_mixes_examples_is_refused():
    with pytest.raises(Exception, match="over the batch"):
        AnyNetwork(lambda: nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.Flatten(), nn.Linear(48, 3)))


def test_looped_sums_stay_in_double(data):
    images, labels = (t.repeat(4, *[1] * (t.dim() - 1)) for t in data)
    stack = Stack([Run("dp-sgd", 1, 1.0, 1.0, 0.1, 200)], PaperNetwork(LAYOUT), images, labels)
    batch = stack._batch(*stack.sampler.parts(0)[0])
    sums = stack.gradients.clipped_sums(stack._theta(), batch, stack.mechanism.bound)
    assert not torch.equal(sums, sums.float().double())


def test_a_program_of_ones_own_is_one_registration(monkeypatch):
    from dpivon.stacked.networks import PROGRAMS, cross_entropy, network_for

    class Mine(nn.Sequential):
        pass

    class MyProgram(AnyNetwork):
        pass

    monkeypatch.setattr("dpivon.stacked.networks.PROGRAMS", dict(PROGRAMS))
    register_program(Mine, lambda model: MyProgram(lambda: model) if len(model) == 1 else None)
    assert type(network_for(Mine(nn.Linear(2, 3)))) is MyProgram
    assert type(network_for(Mine(nn.Linear(2, 3), nn.ReLU()))) is AnyNetwork  # which it does not apply to
    assert type(network_for(nn.Sequential(nn.Linear(2, 3)))) is AnyNetwork
    assert (
        type(network_for(Mine(nn.Linear(2, 3)), lambda outputs, labels: cross_entropy(outputs, labels))) is AnyNetwork
    )
    frozen = Mine(nn.Linear(2, 3))
    frozen[0].bias.requires_grad_(False)
    assert type(network_for(frozen)) is AnyNetwork
