"""Neighbouring data sets, the same random streams, forced membership: what is about to be noised moves by at most C."""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from private_runs import CLASSES, EXAMPLES, FEATURES, CapturingNoise, Run, convnet, data, images, ivon, make, mlp
from torch import Tensor, nn

import dpivon
from dpivon import stacked
from dpivon.privacy.gradients.bookkeeping import BookKeeper

C, SIGMA = 0.7, 1.3
TOLERANCE = 1e-5
Batch = tuple[Tensor, Tensor]


def private(mode: str, net: nn.Module, batch: Batch, **options: Any) -> Run:
    """A run on this batch whose public constants are those of the larger data set."""
    declared = {"dataset_size": EXAMPLES + 1, "expected_batch_size": EXAMPLES + 1, "batch_size": 4}
    options = {"max_grad_norm": C, "noise_multiplier": SIGMA, **declared, **options}
    return make(mode, module=copy.deepcopy(net), data=batch, **options)


def sampled_sum(run: Run, batch: Batch) -> Tensor:
    """The clipped sum at a posterior sample θ, which is the same for both data sets."""
    next(iter(run.loader))
    torch.manual_seed(5)
    run.optimizer.zero_grad()
    with run.optimizer.sampled_params(train=True):
        run.backward(*batch)
    run.optimizer.step()
    return run.contributions[-1]


def with_example(batch: Batch, x: Tensor, label: int) -> Batch:
    return torch.cat([batch[0], x.unsqueeze(0)]), torch.cat([batch[1], torch.tensor([label])])


EXTRA = {
    "ordinary": lambda x: x,
    "scaled by 1e6": lambda x: 1e6 * x,
    "scaled by 1e-6": lambda x: 1e-6 * x,
    "zero": lambda x: 0 * x,
    "NaN": lambda x: torch.full_like(x, math.nan),
    "one NaN": lambda x: torch.where(torch.arange(x.numel()).reshape(x.shape) == 0, math.nan, x),
    "Inf": lambda x: torch.full_like(x, math.inf),
    "overflowing": lambda x: torch.full_like(x, 3e38),
}


@pytest.mark.campaign(keep=13)
@pytest.mark.parametrize("kind", [*EXTRA, "duplicated"])
@pytest.mark.parametrize("net", [mlp, convnet])
def test_one_example_moves_the_sum_by_at_most_the_clipping_bound(mode, net, kind):
    torch.manual_seed(1)
    batch, extra = (data(), data(1, seed=8)[0][0]) if net is mlp else (images(), images(1, seed=8)[0][0])
    x = batch[0][2] if kind == "duplicated" else EXTRA[kind](extra)
    model = net()
    smaller = private(mode, model, batch)
    larger = private(mode, model, with_example(batch, x, 1))
    without, with_x = sampled_sum(smaller, batch), sampled_sum(larger, with_example(batch, x, 1))
    moved = float((with_x - without).norm())
    assert moved <= C * (1 + TOLERANCE)
    if kind in ("ordinary", "duplicated"):
        assert moved > 0.1 * C  # the test would see an example that was lost
    assert float(without.norm()) > C


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_the_bound_holds_in_a_large_batch_of_coherent_gradients_and_shifted_activations(mode, offset):
    """A sum of b nearly parallel gradients is b times as long as one of them, and so is its rounding."""
    n = 601
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, FEATURES, generator=generator) + offset + 1e-3 * torch.randn(n, FEATURES, generator=generator)
    y = torch.zeros(n, dtype=torch.long)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    declared = {"dataset_size": n, "expected_batch_size": n, "max_grad_norm": 0.01}
    with_x = private(mode, net, (x, y), **declared).release(x, y)
    for i in (0, 300, n - 1):
        rest = [j for j in range(n) if j != i]
        without = private(mode, net, (x[rest], y[rest]), **declared).release(x[rest], y[rest])
        assert float((with_x - without).norm()) / 0.01 <= 1 + TOLERANCE
    assert float(with_x.norm()) / 0.01 > 0.99 * n


class Tokens(nn.Module):
    """A linear layer on sequences, whose ghost norm ⟨AAᵀ, GGᵀ⟩ cancels when activations share an offset."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last((h[:, 1:] - h[:, :-1]).mean(1) * 50)


@pytest.mark.parametrize("offset", [0.0, 30.0, 1000.0])
def test_the_bound_holds_for_sequences_whose_activations_share_an_offset(mode, offset):
    generator = torch.Generator().manual_seed(0)
    x = 0.01 * torch.randn(1, 9, 4, generator=generator) + offset
    y = torch.zeros(1, dtype=torch.long)
    torch.manual_seed(1)
    net = Tokens()
    with torch.no_grad():
        net.first.bias -= net.first.weight.sum(1) * offset  # keep tanh out of saturation
    total = private(mode, net, (x, y), max_grad_norm=1e-4).release(x, y)
    assert float(total.norm()) / 1e-4 <= 1 + TOLERANCE


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_noise_is_exactly_sigma_times_c_and_everything_public_is_equal(mode, reduction):
    net, batch = mlp(), data()
    x = data(1, seed=8)[0][0]
    runs = []
    for d in (batch, with_example(batch, x, 1)):
        run = private(mode, net, d, loss_reduction=reduction, criterion=nn.CrossEntropyLoss(reduction=reduction))
        for _ in range(3):
            run.release(*d)
        assert run.noise.stds == [SIGMA * C] * 3 * len(run.optimizer.params)
        assert len(run.engine.accountant) == 3
        runs.append(run)
    a, b = runs
    assert a.optimizer.spec == b.optimizer.spec
    assert a.optimizer.spec.divisor == (EXAMPLES + 1 if reduction == "mean" else 1)
    assert a.optimizer.last_release.variance == b.optimizer.last_release.variance
    assert a.loader.sample_rate == b.loader.sample_rate
    assert len(a.loader) == len(b.loader)
    assert a.engine.accountant.history == b.engine.accountant.history == [(SIGMA, 1.0, 3)]
    assert [s.shape for s in a.noise.sums] == [s.shape for s in b.noise.sums]
    ours, theirs = (run.inner.param_groups[0] for run in runs)
    assert [ours[k] for k in ("ess", "lr", "beta1", "beta2")] == [theirs[k] for k in ("ess", "lr", "beta1", "beta2")]
    steps = [[state["step"] for state in run.inner.state.values()] for run in runs]
    assert steps[0] == steps[1] == [3] * len(a.optimizer.params)


@pytest.mark.parametrize("bounds", [[0.1, 0.2, 0.3, 0.4], [1e-3, 5.0, 1e-3, 5.0]])
def test_per_layer_clipping_bounds_every_tensor_and_the_noise_covers_all_of_them(bounds):
    net, batch = mlp(), data()
    x = 100 * data(1, seed=8)[0][0]
    options = {"clipping": "per_layer", "max_grad_norm": bounds}
    sums = []
    for d in (batch, with_example(batch, x, 1)):
        run = private("bookkeeping", net, d, **options)
        run.release(*d)
        sums.append(run.noise.sums)
    total = math.hypot(*bounds)
    moved = [float((p - q).norm()) for p, q in zip(*sums, strict=True)]
    assert all(m <= c * (1 + TOLERANCE) for m, c in zip(moved, bounds, strict=True))
    assert max(m / c for m, c in zip(moved, bounds, strict=True)) > 0.9
    assert run.noise.stds[0] == pytest.approx(SIGMA * total)


def test_augmentations_of_one_example_are_clipped_as_one(mode):
    x, y = data(1)
    rows = (100 * x).repeat(4, 1), y.repeat(4)
    total = private(mode, mlp(), rows, augmentations=4).release(*rows)
    assert float(total.norm()) == pytest.approx(C, rel=1e-4)


def test_every_release_is_charged_before_any_of_its_noise_is_drawn(mode):
    run = private(mode, mlp(), data())
    seen = []

    class Watching(CapturingNoise):
        def normal(self, like: Tensor, std: float) -> Tensor:
            seen.append(len(run.engine.accountant))
            return super().normal(like, std)

    run.noise = run.optimizer.noise = Watching()
    for k in (1, 2):
        run.release(*data())
        assert seen == [k] * len(run.optimizer.params)
        seen.clear()


def test_a_noise_source_that_fails_leaves_the_charge_and_releases_nothing(mode):
    run = private(mode, mlp(), data())
    before = [p.detach().clone() for p in run.optimizer.params]
    run.noise.fail = True
    with pytest.raises(RuntimeError, match="broken"):
        run.release(*data())
    assert len(run.engine.accountant) == 1
    assert run.optimizer.last_release is None
    assert all(torch.equal(a, b) for a, b in zip(before, run.optimizer.params, strict=True))


def test_a_charge_that_is_refused_releases_nothing(mode):
    run = private(mode, mlp(), data())

    def refuse(spec: dpivon.NoiseSpec) -> None:
        raise dpivon.PrivacyError("no more")

    run.optimizer.charge = refuse
    with pytest.raises(dpivon.PrivacyError, match="no more"):
        run.release(*data())
    assert run.noise.sums == []
    assert run.optimizer.last_release is None


def drowned(like: Tensor) -> Tensor:
    """So large that in fp32 a sum of a dozen gradients clipped to 1e-4 vanishes in it: the release is the same for all data."""
    return torch.full_like(like, 2.0**15)


OPTIMIZERS = {
    "ivon": ivon(),
    "ivon reparam": ivon(curvature="reparam"),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1e-12, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_the_released_gradient_frozen_other_data_give_a_bit_equal_state(mode, name):
    states = []
    net = mlp()
    for batch in (data(seed=0), tuple(t[:5] for t in data(seed=99))):
        run = private(mode, net, batch, optimizer=OPTIMIZERS[name], max_grad_norm=1e-4)
        run.noise.answer = drowned
        for _ in range(3):
            if name.startswith("ivon"):
                sampled_sum(run, batch)
            else:
                run.release(*batch)
        tensors = [p.detach() for p in run.optimizer.params]
        for state in run.inner.state.values():
            tensors += [torch.as_tensor(value) for _, value in sorted(state.items())]
        states.append((tensors, run.contributions))
    (ours, sums), (theirs, other_sums) = states
    assert not torch.equal(sums[0], other_sums[0])  # the data did differ
    assert len(ours) == len(theirs) > len(net.state_dict())
    assert all(torch.isfinite(t).all() for t in ours)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_sums_are_taken_in_full_precision_whatever_the_caller_has_switched_on(mode, monkeypatch):
    """TF32 or bf16 in the sum but not in the norm would let one example contribute more than C."""
    run, seen = make(mode), []
    original = type(run.optimizer.source).clipped_sums

    def watched(self, *args):
        seen.append(products())
        return original(self, *args)

    monkeypatch.setattr(type(run.optimizer.source), "clipped_sums", watched)
    with low_precision():
        run.release(*data())
        assert seen == [("ieee",) * 4]
        assert products() == LOW


def test_so_are_a_stacks(monkeypatch):
    seen, original = [], BookKeeper.clipped_sums

    def watched(self, *args):
        seen.append(products())
        return original(self, *args)

    monkeypatch.setattr(BookKeeper, "clipped_sums", watched)
    network, labels = stacked.AnyNetwork(lambda: nn.Linear(4, 3)), torch.zeros(8, dtype=torch.long)
    stack = stacked.Stack([stacked.Run("dp-sgd", 1, 1.0, 1.0, 0.1, 8)], network, torch.randn(8, 4), labels)
    with low_precision():
        assert list(stack.train(1)) == [1]
        assert set(seen) == {("ieee",) * 4}
        assert products() == LOW


PRODUCTS = (
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,
    torch.backends.mkldnn.matmul,
    torch.backends.mkldnn.conv,
)
LOW = ("tf32", "tf32", "bf16", "bf16")


def products() -> tuple[str, ...]:
    """In what fp32 operands are multiplied, in matrices and convolutions, on a GPU and on a CPU."""
    return tuple(switch.fp32_precision for switch in PRODUCTS)


@contextmanager
def low_precision():
    """What ``torch.set_float32_matmul_precision("medium")`` comes to."""
    before = products()
    for switch, value in zip(PRODUCTS, LOW, strict=True):
        switch.fp32_precision = value
    try:
        yield
    finally:
        for switch, value in zip(PRODUCTS, before, strict=True):
            switch.fp32_precision = value
