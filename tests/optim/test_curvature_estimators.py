"""Every estimator's bias and variance, simulated, against the closed forms in its docstring."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.optim.estimator_trials import RHO, S2, after, close, known, normals, phi, squared_weights
from torch import Tensor, nn

import dpivon
from dpivon import IVON, Release
from dpivon.optim.curvature import (
    ESTIMATORS,
    Averaged,
    CorrectedSquaredGradient,
    EmpiricalBayes,
    Evidence,
    estimate,
    memory_of,
    remembered,
    resolve,
)
from dpivon.optim.ivon_rule import curvature_update
from dpivon.optim.steady import CalmOptimizer
from dpivon.optim.tensors import TensorList

# ---- closed forms, coordinate by coordinate


def test_the_papers_projection_is_not() -> None:
    g = math.sqrt(S2) * normals(1, 1, 200, 1000)
    close(CorrectedSquaredGradient()(after(CorrectedSquaredGradient(), g)), 2 * phi(1) * S2)


@pytest.mark.parametrize("steps", [1, 2, 5, 60])
def test_squared_weights_are_those_of_the_average(steps: int) -> None:
    w = torch.tensor([(1 - RHO) * RHO ** (steps - k) / (1 - RHO**steps) for k in range(1, steps + 1)])
    assert float(w.sum()) == pytest.approx(1.0)
    assert squared_weights(RHO, steps) == pytest.approx(float(w.square().sum()), rel=1e-5)


@pytest.mark.parametrize("steps", [1, 4, 40])
def test_an_average_projected_once_keeps_little_of_the_noise(steps: int) -> None:
    """Equal weights (ρ near 1) make n a/s² + n a χ²_n: E max(a, 0) = 2 s² f_{n+2}(n)."""
    g = math.sqrt(S2) * normals(steps, 1, 50, 1000)
    evidence = after(Averaged(), g, decay=1 - 1e-9)
    log_density = steps / 2 * math.log(steps) - steps / 2 - (steps + 2) / 2 * math.log(2) - math.lgamma((steps + 2) / 2)
    close(Averaged()(evidence), 2 * S2 * math.exp(log_density))
    if steps == 1:
        assert 2 * math.exp(log_density) == pytest.approx(2 * phi(1))  # the paper's estimator
    if steps == 40:
        assert 2 * math.exp(log_density) == pytest.approx(1 / math.sqrt(math.pi * steps), rel=0.02)
    close(Averaged().average(evidence), 0.0, 2 * S2**2 / steps)


def test_the_average_is_corrected_with_the_variance_that_each_release_had() -> None:
    """A noise schedule: s² halves midway."""
    estimator, memory = Averaged(), {"second": torch.zeros(1, 100, 1000, dtype=torch.float64)}
    for t in range(1, 21):
        s2 = S2 if t <= 10 else S2 / 2
        g = 0.2 + math.sqrt(s2) * normals(1, 100, 1000, seed=t)
        evidence = remembered(estimator, Evidence(g, g.square(), None, s2, g, 1.0, 0.0, t=t, decay=RHO, memory=memory))
        memory = dict(evidence.memory)
    close(estimator.average(evidence), 0.04)


def test_the_standard_error_is_that_of_the_average() -> None:
    evidence = after(EmpiricalBayes(), math.sqrt(S2) * normals(30, 1, 50, 1000))
    error = EmpiricalBayes().standard_error(evidence)
    assert float(error.max()) == pytest.approx(S2 * math.sqrt(2 * squared_weights(RHO, 30)))
    close(Averaged().average(evidence), 0.0, float(error.max()) ** 2)


# ---- pooling


def test_empirical_bayes_has_the_squared_error_of_a_wiener_filter() -> None:
    """A tensor whose v_i have spread τ² and averages with noise e²: the mean squared error is λ e²."""
    e = float(EmpiricalBayes().standard_error(after(EmpiricalBayes(), normals(20, 1, 2, 2))).mean())
    evidence = after(EmpiricalBayes(), normals(20, 1, 2, 2))
    for tau in (0.0, 0.5 * e, e, 3 * e):
        v = 2.0 + tau * normals(1, 100, 500, seed=1)
        a = v + e * normals(1, 100, 500, seed=2)
        got = EmpiricalBayes()(replace(evidence, memory=known(a, e)))
        shrink = tau**2 / (tau**2 + e**2)
        assert float((got - v).square().mean()) == pytest.approx(shrink * e**2, rel=0.03, abs=2e-3 * e**2)
        assert float((got - v).mean()) == pytest.approx(0.0, abs=4 * e / math.sqrt(v.numel()))


def test_empirical_bayes_without_noise_is_the_average_and_without_a_signal_the_mean() -> None:
    g = normals(5, 1, 40, 50)
    exact = after(EmpiricalBayes(), g, noise_variance=0.0)
    torch.testing.assert_close(EmpiricalBayes()(exact), Averaged().average(exact))
    noise = after(EmpiricalBayes(), math.sqrt(S2) * g)
    v, a = EmpiricalBayes()(noise), EmpiricalBayes().average(noise)
    assert float(v.std()) < 0.1 * float(a.std())
    assert float(v.mean()) == pytest.approx(float(a.mean()))


def test_one_number_for_all_is_their_mean_with_the_noise_of_all() -> None:
    """Unbiased for the mean of unequal v_i, with variance e²/P; the same from rows of a stack and from tensors."""
    repetitions, weights, steps = 3000, 12, 5
    v = torch.linspace(0.0, 2.0, weights).double()
    gradients = v.sqrt() + S2**0.5 * normals(steps, repetitions, weights)
    estimator = resolve("whole")
    evidence = after(estimator, gradients)
    found = estimate(estimator, evidence, [(3, 4)])
    assert bool((found == found[:, :1]).all())
    share = float(squared_weights(evidence.decay, steps))
    variance = share * float((2 * S2**2 + 4 * v * S2).mean()) / weights
    close(found[:, 0], float(v.mean()), variance)
    one = {name: value[0] for name, value in evidence.memory.items()}
    lists = {name: TensorList([value[:5], value[5:].view(1, 7)]) for name, value in one.items()}
    g = TensorList([gradients[-1, 0, :5], gradients[-1, 0, 5:].view(1, 7)])
    apart = estimate(estimator, replace(evidence, g=g, g_squared=g.square(), hess=g, memory=lists))
    for each in apart:
        torch.testing.assert_close(each, found[0, 0].expand_as(each))


@pytest.mark.parametrize("make", [IVON, CalmOptimizer])
def test_one_number_for_all_is_one_a_group_whatever_its_parameters_are_kept_in(make: Any) -> None:
    a, b, c = (nn.Parameter(torch.ones(n, dtype=torch.bfloat16)) for n in (12, 5, 7))
    groups = [{"params": [a, b]}, {"params": [c]}]
    optimizer = make(groups, lr=0.1, ess=10.0, beta2=0.5, weight_decay=0.5, curvature="whole")
    g = {p: torch.full_like(p, value, dtype=torch.float32) for p, value in ((a, 2.0), (b, 1.0), (c, 3.0))}
    optimizer.step(release=Release(g, S2, 16.0))
    means = [(12 * 4.0 + 5 * 1.0) / 17 - S2, 9.0 - S2]
    for group, mean in zip(optimizer.param_groups, means, strict=True):
        expected = curvature_update(torch.ones(1), torch.tensor([10.0 * mean]), beta2=0.5, weight_decay=0.5)
        for p in group["params"]:
            assert optimizer.state[p]["hess"].dtype is torch.float32
            torch.testing.assert_close(optimizer.state[p]["hess"], expected.expand_as(p))


# ---- in the optimizer


def released(optimizer: IVON, gradients: dict[Tensor, Tensor], batch: float | None = 16.0) -> None:
    optimizer.step(release=Release(gradients, S2, batch))


@pytest.mark.parametrize("name", ["averaged", "empirical-bayes", "whole"])
def test_the_fisher_scale_is_the_batch_instead_of_the_data_set(name: str) -> None:
    g = normals(3, 1, 4, 5)
    evidence = after(resolve(name), g, ess=1000.0, batch_size=16.0)
    torch.testing.assert_close(resolve(f"{name}-fisher")(evidence) * (1000.0 / 16.0), resolve(name)(evidence))


def test_the_fisher_scale_needs_a_release_that_states_its_batch() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = IVON([p], lr=0.1, ess=10, curvature="averaged-fisher")
    with pytest.raises(ValueError, match="curvature='averaged-fisher': scales by the expected batch"):
        released(optimizer, {p: torch.ones(3)}, batch=None)


def test_the_engines_releases_state_the_expected_batch() -> None:
    model = nn.Linear(2, 2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 2)), batch_size=4)
    private, optimizer, batches = dpivon.PrivacyEngine().make_private(
        module=model,
        optimizer=IVON(model.parameters(), lr=0.1, ess=8, curvature="averaged-fisher"),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for (x,) in batches:
        optimizer.zero_grad()
        with optimizer.sampled_params(train=True):
            private(x).sum(1).mean().backward()
        optimizer.step()
        assert optimizer.last_release.batch_size == 4.0  # expected, whatever was drawn


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if memory_of(ESTIMATORS[n])])
def test_what_an_estimator_remembers_is_saved_and_goes_on(name: str) -> None:
    def run(split: int | None) -> tuple[Tensor, dict[str, Any]]:
        p = nn.Parameter(torch.ones(3, 4))
        make: Callable[[], IVON] = lambda: IVON([p], lr=0.1, ess=10, beta2=0.5, curvature=name)  # noqa: E731
        optimizer = make()
        for t in range(6):
            if t == split:
                saved = optimizer.state_dict()
                optimizer = make()
                optimizer.load_state_dict(saved)
            released(optimizer, {p: normals(3, 4, seed=t).float()})
        return p.detach().clone(), dict(optimizer.state[p])

    (ours, state), (theirs, _) = run(None), run(3)
    assert torch.equal(ours, theirs)
    assert {f"curvature_{key}" for key in memory_of(ESTIMATORS[name])} < set(state)


def test_a_state_of_another_estimator_is_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    first, second = (IVON([p], lr=0.1, ess=10, curvature=name) for name in ("gradsq", "averaged"))
    released(first, {p: torch.ones(3)})
    second.load_state_dict(first.state_dict())
    with pytest.raises(dpivon.errors.DpivonError, match="made with another estimator"):
        released(second, {p: torch.ones(3)})
