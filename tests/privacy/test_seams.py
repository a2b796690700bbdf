"""A mechanism and a clipping rule of somebody else's: one class and one registration each, on every path."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon.audit.stack_session import TracedNetwork
from dpivon.durable.ledger import Ledger, read
from dpivon.errors import ArgumentError, BudgetSpent
from dpivon.optim.tensors import TensorList
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.clipping import (
    CLIPPINGS,
    FlatClipping,
    PerLayerClipping,
    clip_factors,
    clipped_sum,
    make_clipping,
    register_clipping,
)
from dpivon.privacy.mechanism import MECHANISMS, Mechanism, NoiseSpec, register_mechanism, release
from dpivon.privacy.noise import SecureNoise, TorchNoise
from dpivon.stacked.checkpoint import StackCheckpoints
from dpivon.stacked.networks import AnyNetwork
from dpivon.stacked.run import Run
from dpivon.stacked.stack import Stack

DECAY = 0.5


@register_mechanism
@dataclass(frozen=True)
class Correlated(Mechanism):
    """z_t − λ z_{t−1}: Σ_k λ^k S_{t−k} + z_t is a Gaussian mechanism of sensitivity C / (1 − λ) at every step."""

    decay: float = DECAY
    name = "test-correlated"

    def cost(self, spec):
        return spec.noise_multiplier * (1 - self.decay), 1.0

    def variance(self, spec):
        return (1 + self.decay**2) * super().variance(spec)

    def init(self, zeros):
        return {"last": zeros}

    def noise(self, draw, std, memory):
        z = draw(std)
        return z - memory["last"] * self.decay, {"last": z}


@register_mechanism
@dataclass(frozen=True)
class Discrete(Mechanism):
    """Discrete Gaussian noise on a grid (Canonne et al., 2020); ``size`` coordinates are each rounded by half a step."""

    size: int = 1
    name = "test-discrete"
    grid = 2.0**-6

    def cost(self, spec):
        c = spec.max_grad_norm
        return spec.noise_multiplier * c / (c + self.grid * math.sqrt(self.size)), 1.0

    def noise(self, draw, std, memory):
        def quantile(t, s):
            k = torch.arange(-round(9 * s / self.grid), round(9 * s / self.grid) + 1, dtype=torch.float64) * self.grid
            mass = torch.exp(-k.square() / (2 * s * s)).cumsum(0)
            return k[torch.searchsorted(mass / mass[-1], torch.special.ndtr(t)).clamp(max=len(k) - 1)]

        z = draw(1.0)
        if isinstance(z, TensorList):
            return TensorList([quantile(t, std) for t in z]), memory
        return torch.stack([quantile(t, float(s)) for t, s in zip(z, std, strict=True)]), memory


@register_clipping
class Normalised(FlatClipping):
    """Every example at about length C (Bu et al., *Automatic clipping*, 2023)."""

    name = "test-normalised"

    def factor(self, norm):
        return self.sensitivity / (norm + 0.01)


@register_clipping
class Careless(FlatClipping):
    """Bounds nothing."""

    name = "test-careless"

    def factor(self, norm):
        return torch.full_like(norm, 3.0)


def net():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def data(n=40):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 4, generator=generator) * 3, torch.randint(0, 2, (n,), generator=generator)


def private(folder=None, *, sigma=1.0, seed=0, engine=None, **options):
    torch.manual_seed(seed)
    model, (x, y) = net(), data()
    engine = engine or dpivon.PrivacyEngine(
        ledger=None if folder is None else folder / "ledger.jsonl", generator=torch.Generator().manual_seed(seed)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    made = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=sigma,
        **{"max_grad_norm": 1.0, **options},
    )
    return engine, *made


def train(model, optimizer, loader, on_step=lambda: None, passes=1):
    for _ in range(passes):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            on_step()


# ---- mechanisms


def spec_of(mechanism, sigma=2.0):
    return NoiseSpec(sigma, 1.0, 4.0, 0.25, mechanism=mechanism)


@pytest.mark.parametrize("source", [TorchNoise(torch.Generator().manual_seed(3)), SecureNoise()])
def test_correlated_noise_has_the_stated_variance_and_correlation(source):
    spec, p = spec_of(Correlated()), torch.zeros(20_000)
    charged = []
    noise = [release({p: p}, spec, source, charged.append).gradients[p].double() for _ in range(3)]
    assert charged == [spec] * 3
    for g in noise[1:]:
        assert float(g.var()) == pytest.approx(spec.variance, rel=0.05)
    lag = float((noise[1] * noise[2]).mean())
    assert lag == pytest.approx(-DECAY * (2.0 / 4.0) ** 2, rel=0.1)


def test_discrete_noise_is_on_its_grid_and_has_its_variance():
    spec, p = spec_of(Discrete(size=20_000)), torch.zeros(20_000)
    total = torch.rand(20_000, dtype=torch.float64)
    made = release({p: total}, spec, TorchNoise(torch.Generator().manual_seed(3)), lambda spec: None)
    steps = made.gradients[p].double() * 4.0 / Discrete.grid
    assert torch.equal(steps, steps.round())
    assert float((made.gradients[p].double() - total / 4.0).var()) == pytest.approx(made.variance, rel=0.05)


@pytest.mark.parametrize("mechanism", ["test-correlated", Correlated(0.25), "test-discrete"])
def test_an_engine_charges_what_the_mechanism_says_before_it_draws(tmp_path, mechanism, monkeypatch):
    engine, model, optimizer, loader = private(tmp_path, mechanism=mechanism)
    kind = type(optimizer.spec.mechanism)
    on_disk, noise = [], kind.noise

    def watched(self, *given):
        on_disk.append(read(tmp_path / "ledger.jsonl").releases)
        return noise(self, *given)

    monkeypatch.setattr(kind, "noise", watched)
    variances = []
    train(model, optimizer, loader, lambda: variances.append(optimizer.last_release.variance))
    assert on_disk == [1, 2, 3, 4]
    sigma, rate = optimizer.spec.cost
    assert engine.accountant.history == [(sigma, rate, 4)]
    assert (sigma, rate) != (1.0, 0.25)
    assert set(variances) == {optimizer.spec.mechanism.variance(optimizer.spec)}
    ((terms, n),) = read(tmp_path / "ledger.jsonl").rows
    assert n == 4
    assert terms[0]["mechanism"] == f"{kind.name}, Poisson-sampled"
    assert (terms[0]["noise_multiplier"], terms[0]["sample_rate"]) == (sigma, rate)
    engine.ledger.close()
    again = dpivon.PrivacyEngine(ledger=tmp_path / "ledger.jsonl")
    assert again.get_epsilon(1e-3) == engine.get_epsilon(1e-3) == epsilon([(sigma, rate, 4)], 1e-3)


def test_a_mechanism_that_charges_nothing_has_no_guarantee():
    class Free(Mechanism):
        name = "test-free"

        def cost(self, spec):
            return 0.0, 1.0

    register_mechanism(Free)
    try:
        engine, model, optimizer, loader = private(mechanism="test-free")
        train(model, optimizer, loader)
        with pytest.warns(dpivon.PrivacyWarning, match="infinite"):
            assert engine.get_epsilon(1e-3) == math.inf
        Free.cost = lambda self, spec: (math.nan, 1.0)
        _, model, optimizer, loader = private(mechanism="test-free")
        with pytest.raises(ArgumentError, match="noise_multiplier"):
            train(model, optimizer, loader)
        assert optimizer.last_release is None
    finally:
        del MECHANISMS["test-free"]


def test_a_budget_is_not_planned_for_a_mechanism_that_costs_otherwise():
    model, (x, y) = net(), data()
    given = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(TensorDataset(x, y), batch_size=10),
        "target_epsilon": 3.0,
        "target_delta": 1e-3,
        "epochs": 1,
        "max_grad_norm": 1.0,
    }
    with pytest.raises(ArgumentError, match="mechanism='test-correlated'"):
        dpivon.PrivacyEngine().make_private_with_epsilon(mechanism="test-correlated", **given)


def test_a_limit_reads_the_cost():
    engine, model, optimizer, loader = private()
    from dpivon.privacy.accounting import Limit

    engine._limit = Limit(3.0, 1e-3, 1.0, 0.25, 10)
    optimizer._spec = optimizer.spec.replace(mechanism=Correlated(0.9))
    with pytest.raises(BudgetSpent):
        train(model, optimizer, loader)
    assert len(engine.accountant) == 0


def test_names_and_objects_that_are_not_registered_are_refused():
    class Unknown(Mechanism):
        name = "test-unknown"

    for given in (Unknown(), "test-unknown", object()):
        with pytest.raises(ArgumentError, match="mechanism"):
            private(mechanism=given)
    with pytest.raises(ArgumentError, match="another mechanism"):

        @register_mechanism
        class Again(Mechanism):
            pass


def test_a_run_with_correlated_noise_goes_on_to_the_bit_and_with_no_other_mechanism(tmp_path):
    def begun(folder, mechanism=Correlated(), **others):  # noqa: B008
        _, model, optimizer, loader = made = private(mechanism=mechanism, **others)
        return (
            model,
            optimizer,
            loader,
            dpivon.Checkpoints(folder, engine=made[0], optimizer=optimizer, data_loader=loader),
        )

    model, optimizer, loader, run = begun(tmp_path / "whole")
    run.restore()
    train(model, optimizer, loader, passes=2)
    whole = [p.detach().clone() for p in model.parameters()]

    model, optimizer, loader, run = begun(tmp_path / "cut")
    run.restore()
    train(model, optimizer, loader)
    run.save()
    run._ledger.close()
    model, optimizer, loader, run = begun(tmp_path / "cut", seed=7)
    run.restore()
    train(model, optimizer, loader)
    assert all(torch.equal(a, b) for a, b in zip(whole, model.parameters(), strict=True))
    for other in ("gaussian", Correlated(0.25)):
        run._ledger.close()
        run = begun(tmp_path / "cut", other)[3]
        with pytest.raises(ArgumentError, match="mechanism"):
            run.restore()


def test_copies_share_what_noise_remembers_and_new_seeds_forget_it():
    import copy

    noise = TorchNoise()
    p, spec = torch.zeros(3), spec_of(Correlated())
    release({p: p}, spec, noise, lambda spec: None)
    assert copy.deepcopy(noise) is noise
    assert noise.memory is not None
    noise.refresh()
    assert noise.memory is None
    secure = SecureNoise()
    assert copy.deepcopy(secure) is secure


# ---- stacks


def runs(k=2, sigma=1.0):
    return [Run("dp-sgd", 5 + i, sigma, 1.0 + i, 0.1, 10) for i in range(k)]


def stack_of(**options):
    x, y = data()
    network = options.pop("network", AnyNetwork)(net)
    return Stack(options.pop("runs", None) or runs(), network, x, y, block=2, **options)


def test_a_stack_draws_and_charges_what_the_mechanism_says():
    stack = stack_of(mechanism="test-correlated")
    std = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    assert torch.equal(stack.mechanism.noise_std.cpu(), std)
    sums = torch.zeros(2, 20_000, dtype=torch.float64)
    stack.mechanism.memory = {}
    first, second = (stack.mechanism.release(sums, torch.tensor(t)).double() for t in (0, 1))
    expected = torch.tensor([s.variance for s in stack.mechanism.specs])
    assert torch.allclose(second.var(1), expected.double(), rtol=0.05)
    assert torch.allclose((first * second).mean(1), -DECAY * (std.flatten() / 10) ** 2, rtol=0.15)

    stack = stack_of(mechanism="test-correlated")
    list(stack.train(4))
    assert [a.history for a in stack.mechanism.accountants] == [[(0.5, 1.0, 4)]] * 2
    assert stack.mechanism.terms[0]["mechanism"] == "test-correlated, Poisson-sampled"
    assert float(stack.mechanism.variance[0]) == pytest.approx(stack.mechanism.specs[0].variance)
    with pytest.raises(dpivon.PrivacyError, match="reserved"):
        stack.mechanism.spend()


def test_a_stack_with_discrete_noise_stays_on_its_grid():
    stack = stack_of(mechanism=Discrete(23))
    sums = torch.rand(2, 23, dtype=torch.float64)
    steps = stack.mechanism.release(sums, torch.tensor(0)).double() * 10 / Discrete.grid
    assert torch.allclose(steps, steps.round(), atol=1e-3)


def test_a_stack_alone_is_the_stack_together_under_another_mechanism():
    both, alone = stack_of(mechanism="test-correlated"), stack_of(mechanism="test-correlated", runs=runs(1))
    list(both.train(4))
    list(alone.train(4))
    assert torch.allclose(both.mean[both.order.index(0)], alone.mean[0], atol=1e-6)


def test_a_stack_with_correlated_noise_goes_on_to_the_bit(tmp_path):
    whole = stack_of(mechanism="test-correlated")
    kept = StackCheckpoints(whole, tmp_path / "a")
    kept.restore()
    list(whole.train(4))

    first = stack_of(mechanism="test-correlated")
    kept = StackCheckpoints(first, tmp_path / "b")
    kept.restore()
    list(first.train(2))
    kept.save({})
    kept.close()
    again = stack_of(mechanism="test-correlated")
    kept = StackCheckpoints(again, tmp_path / "b")
    kept.restore()
    list(again.train(2))
    assert torch.equal(whole.mean, again.mean)
    kept.close()
    with pytest.raises(ArgumentError, match="other runs"):
        StackCheckpoints(stack_of(), tmp_path / "b").restore()


# ---- clipping rules


@pytest.mark.parametrize("clipping", ["test-normalised", Normalised(1.0)])
def test_an_engine_clips_by_the_rule_and_says_so(tmp_path, clipping):
    with pytest.warns(dpivon.PrivacyWarning, match="not differentially private"):
        _, model, optimizer, loader = private(tmp_path, clipping=clipping, sigma=0.0, poisson_sampling=False)
    inner, (x, y) = net(), next(iter(loader))
    inner.load_state_dict(model._module.state_dict())
    expected = 0.0
    for a, b in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(inner(a[None]), b[None])
        flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(inner.parameters()))])
        expected = expected + flat / (flat.norm() + 0.01)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    got = torch.cat([g.flatten() for g in optimizer.last_release.gradients.values()])
    assert torch.allclose(got, expected / len(x), atol=1e-6)
    ((terms, _),) = read(tmp_path / "ledger.jsonl").rows
    assert terms[0]["clipping"] == "test-normalised"


@pytest.mark.parametrize("network", [AnyNetwork, TracedNetwork])
def test_a_stack_clips_by_the_rule(network):
    sums = {}
    for rule in ("flat", "test-normalised", "test-careless", "per_layer"):
        stack = stack_of(clipping=rule, network=network)
        stack.mechanism.reserve(1)
        stack._draw(1)
        seen, given = [], stack.gradients.clipped_sums
        stack.gradients.clipped_sums = lambda *a, given=given, seen=seen: seen.append((a, given(*a))) or seen[-1][1]
        stack.mechanism.spend()
        stack._launch()
        (theta, batch, *_), sums[rule] = seen[0]
    for k, c in enumerate((1.0, 2.0)):
        begin, end = int(batch.start[k]), int(batch.start[k + 1])
        model = stack.network.model(theta[k])
        each = []
        for a, b in zip(batch.inputs[begin:end], batch.labels[begin:end], strict=True):
            loss = nn.functional.cross_entropy(model(a[None]), b[None])
            each.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
        g = torch.stack(each).double()
        norms = g.norm(dim=1, keepdim=True)
        assert torch.allclose(sums["test-normalised"][k], (c * g / (norms + 0.01)).sum(0), atol=1e-5)
        assert torch.allclose(sums["flat"][k], (g * (c / norms).clamp(max=1)).sum(0), atol=1e-5)
        assert torch.allclose(sums["test-careless"][k], (g * (c / norms).clamp(max=3)).sum(0), atol=1e-4)
        parts = g.split([p.numel() for p in model.parameters()], 1)
        own = [p * (c / len(parts) ** 0.5 / p.norm(dim=1, keepdim=True)).clamp(max=1) for p in parts]
        assert torch.allclose(sums["per_layer"][k], torch.cat(own, 1).sum(0), atol=1e-5)


def test_fit_clips_by_the_rule():
    x, y = data()
    given = {"lr": 0.5, "batch_size": 10, "epochs": 2, "delta": 1e-3, "noise_multiplier": 1e-3, "method": "dp-sgd"}
    torch.manual_seed(0)
    model = net()
    flat, normalised, again = (
        dpivon.fit(model, x / 30, y, seed=1, clipping=rule, **given)
        for rule in ("flat", "test-normalised", Normalised(2.0))
    )
    means = [torch.cat([p.flatten() for p in f.model.parameters()]) for f in (flat, normalised, again)]
    assert not torch.allclose(means[0], means[1], atol=1e-3)
    assert torch.equal(means[1], means[2])
    assert flat.epsilon == normalised.epsilon


def test_a_rule_cannot_exceed_what_it_says():
    g = [torch.randn(50, 3, 4) * 10, torch.randn(50, 5)]
    g[0][7] = math.nan
    for i in range(50):
        total = clipped_sum([t[i : i + 1] for t in g], Careless(2.0))
        length = math.sqrt(sum(float(t.square().sum()) for t in total))
        assert length <= 2.0 * (1 + 1e-6)
        assert (length == 0.0) == (i == 7)
    ours = torch.rand(2, 9) * 3
    assert torch.equal(clip_factors(FlatClipping(1.0), ours), FlatClipping(1.0).factors(ours))
    assert (clip_factors(Careless(1.0), torch.zeros(2, 1)) <= 3.0).all()

    class Negative(Careless):
        def factor(self, norm):
            return -norm

    assert torch.equal(clip_factors(Negative(1.0), ours), torch.zeros_like(ours))


def test_rules_are_made_by_name_or_from_an_object_that_is_registered():
    assert make_clipping("test-normalised", 2.0, 4) == Normalised(2.0)
    assert make_clipping(Normalised(5.0), 2.0, 4) == Normalised(2.0)
    assert make_clipping(PerLayerClipping((3.0, 4.0)), 1.0, 2).bounds == pytest.approx((0.6, 0.8))

    class Unknown(FlatClipping):
        name = "test-unknown"

    for given in (Unknown(1.0), "test-unknown", object(), 3):
        with pytest.raises(ArgumentError, match="clipping"):
            make_clipping(given, 1.0, 2)
    with pytest.raises(ArgumentError, match="another clipping rule"):

        @register_clipping
        class Again(FlatClipping):
            pass

    assert set(CLIPPINGS) >= {"flat", "per_layer"}


def test_a_scheduler_changes_the_bound_of_any_rule():
    _, _, optimizer, _ = private(clipping="test-normalised")
    optimizer.max_grad_norm = 3.0
    assert optimizer.clipping == Normalised(3.0)


def test_a_run_does_not_go_on_under_another_rule(tmp_path):
    for clipping, fails in (("test-normalised", False), ("flat", True)):
        engine, model, optimizer, loader = private(clipping=clipping)
        run = dpivon.Checkpoints(tmp_path, engine=engine, optimizer=optimizer, data_loader=loader)
        if fails:
            with pytest.raises(ArgumentError, match="clipping"):
                run.restore()
        else:
            run.restore()
            train(model, optimizer, loader)
            run.save()
        engine.ledger.close()


def test_digests_of_gaussian_and_flat_specs_are_those_of_older_ledgers():
    assert NoiseSpec(1.0, 1.0, 10.0, 0.25).digest == NoiseSpec(1.0, 1.0, 10.0, 0.25, clipping="per_layer").digest
    assert NoiseSpec(1.0, 1.0, 10.0, 0.25).digest == "1c37204ac076f569"
    assert len({spec_of(m).digest for m in (Mechanism(), Correlated(), Correlated(0.1))}) == 3
    assert "clipping" not in NoiseSpec(1.0, 1.0, 10.0, 0.25).terms


def test_a_ledger_replays_the_cost(tmp_path):
    spec = spec_of(Correlated())
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.charge((spec.terms,), 3)
    ledger.close()
    assert dpivon.PrivacyEngine(ledger=tmp_path / "ledger.jsonl").accountant.history == [(1.0, 1.0, 3)]
