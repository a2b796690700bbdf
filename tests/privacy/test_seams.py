"""A mechanism and a clipping rule of somebody else's: one class and one registration each, on every path."""

from __future__ import annotations

import math

import pytest
import torch
from seam_cases import (
    DECAY,
    Correlated,
    Discrete,
    data,
    net,
    private,
    runs,
    spec_of,
    stack_of,
    train,
)
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon.durable.ledger import read
from dpivon.errors import ArgumentError, BudgetSpent
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.mechanism import MECHANISMS, Mechanism, register_mechanism, release
from dpivon.privacy.noise import SecureNoise, TorchNoise
from dpivon.stacked.checkpoint import StackCheckpoints


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


@pytest.mark.slow
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
