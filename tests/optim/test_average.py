"""Iterate averaging against its closed form, for every kind of optimizer, and exactly resumed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpivon import EMA, IVON, RuleOptimizer
from dpivon.optim.average import average_update
from dpivon.optim.point import SGD

DECAY = 0.8


def closed_form(iterates: list[Tensor], decay: float = DECAY) -> Tensor:
    weights = torch.tensor([decay ** (len(iterates) - 1 - k) for k in range(len(iterates))], dtype=torch.float64)
    return (weights.unsqueeze(1) * torch.stack(iterates)).sum(0) / weights.sum()


OPTIMIZERS = {
    "torch": lambda params: torch.optim.Adam(params, lr=0.1),
    "rule": lambda params: RuleOptimizer(params, SGD(), lr=0.1),
    "ivon": lambda params: IVON(params, lr=0.1, ess=10.0, curvature="gradsq"),
}


def run(optimizer: Any, p: nn.Parameter, seeds: range) -> list[Tensor]:
    iterates = []
    for seed in seeds:
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=p.dtype)
        optimizer.step()
        iterates.append(p.detach().clone())
    return iterates


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_average_is_the_normalised_sum_of_the_iterates(kind: str) -> None:
    p = nn.Parameter(torch.full((3,), 100.0, dtype=torch.float64))  # far away: the start must not weigh on it
    optimizer = OPTIMIZERS[kind]([p])
    average = EMA(optimizer, DECAY)
    assert torch.equal(average.average(p), p.detach())
    iterates = run(optimizer, p, range(9))
    torch.testing.assert_close(average.average(p), closed_form(iterates), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_average_resumes_exactly_with_its_optimizer(kind: str) -> None:
    p = nn.Parameter(torch.zeros(3))
    optimizer = OPTIMIZERS[kind]([p])
    average = EMA(optimizer, DECAY)
    run(optimizer, p, range(4))
    q = nn.Parameter(p.detach().clone())
    resumed = OPTIMIZERS[kind]([q])
    copied = EMA(resumed, 0.1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, p, range(4, 8))
    run(resumed, q, range(4, 8))
    assert torch.equal(average.average(p), copied.average(q))
    assert copied.decay == DECAY


def test_a_state_without_an_average_is_refused_while_averaging() -> None:
    p = nn.Parameter(torch.zeros(3))
    plain = OPTIMIZERS["rule"]([p])
    run(plain, p, range(1))
    state = plain.state_dict()
    EMA(plain)
    with pytest.raises(Exception, match="no average"):
        plain.load_state_dict(state)
    with pytest.raises(ValueError, match="averaged already"):
        EMA(plain)


def test_applied_swaps_and_restores_whatever_happens() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = EMA(optimizer, DECAY)
    run_p = model.weight
    for seed in range(3):
        run_p.grad = torch.randn(1, 3, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
    before = run_p.detach().clone()

    def fail_inside() -> None:
        with average.applied():
            assert torch.equal(run_p, average.average(run_p))
            assert not torch.equal(run_p, before)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert torch.equal(run_p, before)


def test_posterior_takes_the_average_as_its_mean_and_keeps_ivons_width() -> None:
    model = nn.Linear(3, 2)
    optimizer = IVON(model.parameters(), lr=0.1, ess=10.0, curvature="gradsq")
    average = EMA(optimizer, DECAY)
    for seed in range(3):
        torch.manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    q, iterate = average.posterior(model), optimizer.posterior(model)
    assert torch.equal(q.mean["weight"], average.average(model.weight))
    assert not torch.equal(q.mean["weight"], iterate.mean["weight"])
    assert torch.equal(q.variance["weight"], iterate.variance["weight"])
    assert q.metadata["ema"] == "0.8"


def test_a_bf16_model_is_averaged_in_full_precision() -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = RuleOptimizer([p], SGD(), lr=1e-3, momentum=0.0, weight_decay=0.0)
    average = EMA(optimizer, DECAY)
    masters = []
    for _ in range(5):
        p.grad = torch.ones_like(p)
        optimizer.step()
        masters.append(optimizer.state[p]["mean"].double().clone())
    torch.testing.assert_close(average.average(p).double(), closed_form(masters), rtol=1e-6, atol=0)


def test_frozen_parameters_are_left_out() -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = torch.optim.SGD([a, b], lr=0.1)
    average = EMA(optimizer)
    a.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(average.average(b), b)
    assert b not in average._average


def test_parameters_of_several_dtypes_and_ages_are_each_averaged_over_their_own_iterates() -> None:
    params = [nn.Parameter(torch.full((n,), 100.0, dtype=d)) for n, d in ((2, torch.float64), (3, torch.float32))]
    params += [nn.Parameter(torch.full((4,), 100.0, dtype=torch.float64)), nn.Parameter(torch.zeros(1))]
    params[2].requires_grad_(False)
    optimizer = torch.optim.SGD(params, lr=0.1)
    average, iterates = EMA(optimizer, DECAY, trace=1.0), [[] for _ in params]  # type: ignore[var-annotated]
    for step in range(8):
        params[2].requires_grad_(step >= 3)
        for p in params:
            p.grad = torch.randn_like(p) if p.requires_grad else None
        optimizer.step()
        for p, own in zip(params, iterates, strict=True):
            own += [p.detach().double().clone()] if p.requires_grad else []
    for p, own in zip(params, iterates, strict=True):
        tolerance = 1e-10 if p.dtype == torch.float64 else 1e-5
        mean = closed_form(own)
        torch.testing.assert_close(average.average(p).double(), mean, rtol=tolerance, atol=tolerance)
        spread = closed_form([(m - mean).square() for m in own])
        torch.testing.assert_close(average._spread[p].double(), spread, rtol=100 * tolerance, atol=tolerance)


def test_a_decay_near_one_is_the_plain_mean() -> None:
    values = torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    average = values[0]
    for t, m in enumerate(values, start=1):
        average = average_update(average, m, decay=1 - 1e-12, t=t)
    torch.testing.assert_close(average, values.mean(0), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan"), "much"])
def test_a_decay_outside_its_range_is_named(decay: Any) -> None:
    with pytest.raises(ValueError, match="ema="):
        EMA(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), decay)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_spread_is_the_weighted_variance_of_the_iterates(kind: str) -> None:
    p = nn.Parameter(torch.full((3,), 100.0, dtype=torch.float64))
    optimizer = OPTIMIZERS[kind]([p])
    average = EMA(optimizer, DECAY, trace=2.0)
    iterates = run(optimizer, p, range(9))
    mean = closed_form(iterates)
    expected = closed_form([(m - mean).square() for m in iterates])
    torch.testing.assert_close(average._spread[p], expected, rtol=1e-10, atol=0)


def test_the_spread_widens_the_posterior_and_resumes_exactly() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = OPTIMIZERS["rule"](model.parameters())
    average = EMA(optimizer, DECAY, trace=2.0)
    run(optimizer, model.weight, range(4))
    q = average.posterior(model)
    torch.testing.assert_close(q.variance["weight"], 2.0 * average._spread[model.weight])
    assert q.metadata["trace"] == "2"
    resumed = copy.deepcopy(model)
    other = OPTIMIZERS["rule"](resumed.parameters())
    copied = EMA(other, 0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, model.weight, range(4, 8))
    run(other, resumed.weight, range(4, 8))
    assert torch.equal(copied.posterior(resumed).variance["weight"], average.posterior(model).variance["weight"])
