"""Every estimator's bias and variance, simulated, against the closed forms in its docstring."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpivon
from dpivon import IVON, Release
from dpivon.optim.calm import CalmOptimizer
from dpivon.optim.curvature import (
    ESTIMATORS,
    Averaged,
    CorrectedSquaredGradient,
    CrossMoment,
    EmpiricalBayes,
    Evidence,
    Floored,
    PooledReparameterised,
    RankOne,
    ShrunkRankOne,
    Signed,
    estimate,
    memory_of,
    remembered,
    resolve,
)
from dpivon.optim.curvature.averages import squared_weights
from dpivon.optim.ivon_rule import curvature_update
from dpivon.optim.tensors import TensorList

S2 = 0.25  # variance of the privacy noise
RHO = 0.9


def phi(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def cdf(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def after(estimator: Any, gradients: Tensor, noise_variance: float = S2, **facts: Any) -> Evidence[Tensor]:
    """The evidence once the estimator has seen gradients [steps, K, rows, columns]."""
    memory = {name: torch.zeros_like(gradients[0]) for name in memory_of(estimator)}
    for t, g in enumerate(gradients, 1):
        settings = {
            "hess": torch.ones_like(g),
            "ess": 1.0,
            "weight_decay": 0.0,
            "decay": RHO,
            "batch_size": 1.0,
        } | facts
        evidence: Evidence[Tensor] = Evidence(
            g=g,
            g_squared=g.square(),
            g_perturbation=None,
            noise_variance=noise_variance,
            t=t,
            memory=memory,
            **settings,
        )
        evidence = remembered(estimator, evidence)
        memory = dict(evidence.memory)
    return evidence


def close(values: Tensor, mean: float, variance: float | None = None, errors: float = 4.0) -> None:
    """The sample agrees with the closed forms to a few of its own standard errors."""
    x = values.flatten()
    assert abs(float(x.mean()) - mean) < errors * float(x.std()) / math.sqrt(len(x))
    if variance is not None:
        squares = (x - x.mean()).square()
        assert abs(float(squares.mean()) - variance) < errors * float(squares.std()) / math.sqrt(len(x))


# ---- closed forms, coordinate by coordinate


@pytest.mark.parametrize("signal", [0.0, 0.3])
def test_signed_is_unbiased_with_the_variance_of_a_square(signal: float) -> None:
    g = signal + math.sqrt(S2) * normals(1, 1, 200, 1000)
    close(Signed()(after(Signed(), g)), signal**2, 2 * S2**2 + 4 * signal**2 * S2)


def test_the_papers_projection_is_not() -> None:
    g = math.sqrt(S2) * normals(1, 1, 200, 1000)
    close(CorrectedSquaredGradient()(after(CorrectedSquaredGradient(), g)), 2 * phi(1) * S2)


@pytest.mark.parametrize("steps", [1, 2, 5, 60])
def test_squared_weights_are_those_of_the_average(steps: int) -> None:
    w = torch.tensor([(1 - RHO) * RHO ** (steps - k) / (1 - RHO**steps) for k in range(1, steps + 1)])
    assert float(w.sum()) == pytest.approx(1.0)
    assert squared_weights(RHO, steps) == pytest.approx(float(w.square().sum()), rel=1e-5)
    columns = squared_weights(torch.full((2, 1), RHO), torch.tensor(steps))
    assert columns.flatten().tolist() == pytest.approx([squared_weights(RHO, steps)] * 2, rel=1e-5)


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


@pytest.mark.parametrize("z", [0.0, 1.5])
def test_the_floor_costs_what_its_docstring_says(z: float) -> None:
    steps, rho = 400, 0.995
    e = S2 * math.sqrt(2 * squared_weights(rho, steps))
    # The average of many χ² is nearly normal; take it as given and check the floor alone.
    evidence = after(Floored(), math.sqrt(S2) * normals(1, 1, 10, 10), decay=rho)
    a = z * e + e * normals(1, 300, 1000, seed=3)
    evidence = replace(evidence, t=steps, memory={"second": a * (1 - rho**steps)})
    assert Floored().standard_error(evidence) == pytest.approx(e)
    c = 1 - z
    mean = e * (c * cdf(c) + phi(c)) + z * e
    second = e**2 * (1 * cdf(1) + phi(1) + 1 - cdf(1)) if z == 0.0 else None
    close(Floored()(evidence), mean, None if second is None else second - mean**2)
    assert float(Floored()(evidence).min()) == pytest.approx(e)


def test_the_standard_error_is_that_of_the_average() -> None:
    evidence = after(Averaged(), math.sqrt(S2) * normals(30, 1, 50, 1000))
    close(Averaged().average(evidence), 0.0, Averaged().standard_error(evidence) ** 2)


@pytest.mark.parametrize("signal", [0.0, 0.4])
def test_the_cross_moment_is_unbiased_for_the_squared_mean_alone(signal: float) -> None:
    """One product after so many steps: E = ḡ², Var = w S² + (1 + w) ḡ² S. ρ = 0 keeps the last product only."""
    steps = 12
    g = signal + math.sqrt(S2) * normals(steps, 1, 100, 1000)
    p = CrossMoment().product(after(CrossMoment(), g, decay=0.0))
    w = squared_weights(0.9, steps - 1)
    close(p, signal**2, w * S2**2 + (1 + w) * signal**2 * S2)


def test_products_without_a_signal_are_uncorrelated_so_their_average_divides_the_variance() -> None:
    steps = 30
    g = math.sqrt(S2) * normals(steps, 1, 50, 1000)
    p = CrossMoment().product(after(CrossMoment(), g))
    weights = [(1 - RHO) * RHO ** (steps - t) / (1 - RHO ** (steps - 1)) for t in range(2, steps + 1)]
    assert sum(weights) == pytest.approx(1.0)
    variance = sum(w**2 * squared_weights(0.9, t - 1) for w, t in zip(weights, range(2, steps + 1), strict=True))
    close(p, 0.0, variance * S2**2)


def test_squares_see_the_sampling_covariance_and_the_cross_moment_does_not() -> None:
    """At ḡ = 0 with Poisson batches of N examples: b·v is (1 − q) F, and the cross moment is nothing."""
    n, b, steps, coordinates = 64, 16, 40, 2000
    examples = normals(n, coordinates, seed=5) * torch.linspace(0.5, 2.0, coordinates, dtype=torch.float64)
    examples -= examples.mean(0)
    fisher = examples.square().mean(0)
    generator = torch.Generator().manual_seed(6)
    drawn = (torch.rand(steps, n, generator=generator) < b / n).double()
    g = ((drawn @ examples) / b + math.sqrt(0.01) * normals(steps, coordinates, seed=7)).view(steps, 1, 1, coordinates)
    flat = {"noise_variance": 0.01, "decay": 1 - 1e-9, "batch_size": float(b)}
    fisher_like = Averaged(scale="batch")(after(Averaged(scale="batch"), g, **flat)).flatten()
    target = (1 - b / n) * fisher
    assert float(fisher_like.mean()) == pytest.approx(float(target.mean()), rel=0.05)
    assert float(torch.corrcoef(torch.stack([fisher_like, target]))[0, 1]) > 0.8
    cross = CrossMoment().product(after(CrossMoment(), g, **flat)).flatten() * b
    assert abs(float(cross.mean())) < 0.05 * float(target.mean())


def test_the_cross_moment_is_floored_at_a_tenth_of_the_tensors_mean() -> None:
    g = 0.5 + 0.01 * normals(6, 2, 3, 4)
    g[:, 0, 0, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])  # it oscillates
    evidence = after(CrossMoment(), g, noise_variance=0.0)
    p, v = CrossMoment().product(evidence), CrossMoment()(evidence)
    assert float(p[0, 0, 0]) < 0
    assert float(v[0, 0, 0]) == pytest.approx(0.1 * float(p[0].mean()))
    assert torch.equal(v[1], p[1])


# ---- pooling


def test_empirical_bayes_has_the_squared_error_of_a_wiener_filter() -> None:
    """A tensor whose v_i have spread τ² and averages with noise e²: the mean squared error is λ e²."""
    e = float(EmpiricalBayes().standard_error(after(EmpiricalBayes(), normals(20, 1, 2, 2))).mean())
    evidence = after(EmpiricalBayes(), normals(20, 1, 2, 2))
    for tau in (0.0, 0.5 * e, e, 3 * e):
        v = 2.0 + tau * normals(1, 100, 500, seed=1)
        a = v + e * normals(1, 100, 500, seed=2)
        got = EmpiricalBayes()(replace(evidence, memory={"second": a * (1 - RHO**20)}))
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


def test_equal_curvature_pooled_by_rank_one_has_the_variance_of_rows_and_columns() -> None:
    rows, columns, v = 8, 20, 1.0
    evidence = after(RankOne(), normals(20, 1, 2, 2))
    e = 0.05
    a = v + e * normals(4000, rows, columns, seed=2)
    got = RankOne()(replace(evidence, noise_variance=0.0, memory={"second": a * (1 - RHO**20)}))
    expected = e**2 * (1 / rows + 1 / columns - 1 / (rows * columns))
    # Coordinates of one matrix share their errors, so each is held to the spread over matrices.
    assert float(got.var(0).mean()) == pytest.approx(expected, rel=0.03)
    assert float(got.mean()) == pytest.approx(v, abs=4 * e / math.sqrt(a.numel()))


def test_rank_one_recovers_what_is_of_rank_one_exactly() -> None:
    rows, columns = normals(1, 6, 1, seed=1).exp(), normals(1, 1, 9, seed=2).exp()
    g = (rows * columns).sqrt().expand(4, 1, 6, 9)
    torch.testing.assert_close(RankOne()(after(RankOne(), g, noise_variance=0.0)), rows * columns)
    vector = normals(3, 1, 1, 7)
    evidence = after(RankOne(), vector)
    torch.testing.assert_close(RankOne()(evidence), Averaged()(evidence))


def test_shrunk_rank_one_is_exact_without_noise_and_nearly_the_mean_without_a_signal() -> None:
    rows, columns = normals(1, 6, 1, seed=1).exp(), normals(1, 1, 9, seed=2).exp()
    g = (rows * columns).sqrt().expand(4, 1, 6, 9)
    torch.testing.assert_close(ShrunkRankOne()(after(ShrunkRankOne(), g, noise_variance=0.0)), rows * columns)
    # Equal curvature, known well on the whole and badly by row: the variance is between the mean's and rank one's.
    n, k, e = 8, 20, 0.05
    evidence = after(ShrunkRankOne(), normals(20, 1, 2, 2), noise_variance=e / math.sqrt(2 * squared_weights(RHO, 20)))
    assert ShrunkRankOne().standard_error(evidence) == pytest.approx(e)
    a = 1.0 + e * normals(4000, n, k, seed=2)
    got = ShrunkRankOne()(replace(evidence, memory={"second": a * (1 - RHO**20)}))
    variance = float(got.var(0).mean())
    assert e**2 / (n * k) < variance < 0.5 * e**2 * (1 / n + 1 / k - 1 / (n * k))
    assert float(got.mean()) == pytest.approx(1.0, abs=4 * e / math.sqrt(a.numel()))


def test_shrunk_rank_one_is_empirical_bayes_on_a_vector() -> None:
    g = 3.0 + normals(8, 1, 1, 40)
    evidence = after(ShrunkRankOne(), g, noise_variance=0.5)
    torch.testing.assert_close(ShrunkRankOne()(evidence), EmpiricalBayes()(evidence))


def test_pooled_price_is_the_mean_hessian_under_privacy_noise() -> None:
    """A quadratic with Hessian d: E = mean d; the variance that the noise adds is s² N_ess (h + δ)/n."""
    k, n, ess, h = 4000, 25, 50.0, 2.0
    curvature = torch.linspace(0.0, 4.0, n, dtype=torch.float64)
    sigma = 1 / math.sqrt(ess * h)
    theta = sigma * normals(k, 1, n, seed=1)
    noise = math.sqrt(S2) * normals(k, 1, n, seed=2)
    for scale in (0.0, 1.0):
        g = curvature * theta + scale * noise
        evidence: Evidence[Tensor] = Evidence(
            g, g.square(), g * theta, scale * S2, torch.full_like(g, h - 0.5), ess, 0.5
        )
        got = PooledReparameterised()(evidence)
        assert got is not None
        assert torch.equal(got[:, :, 0], got[:, :, -1])
        own = float(2 * curvature.square().mean()) / n  # of g ⊙ θ/σ² itself: 2 d² a weight
        close(got[:, 0, 0], float(curvature.mean()), own + scale * S2 * ess * h / n)


# ---- in the optimizer


def released(optimizer: IVON, gradients: dict[Tensor, Tensor], batch: float | None = 16.0) -> None:
    optimizer.step(release=Release(gradients, S2, batch))


@pytest.mark.parametrize(
    "name", ["signed", "averaged", "floored", "empirical-bayes", "rank-one", "rank-one-shrunk", "whole"]
)
def test_the_fisher_scale_is_the_batch_instead_of_the_data_set(name: str) -> None:
    g = normals(3, 1, 4, 5)
    evidence = after(resolve(name), g, ess=1000.0, batch_size=16.0)
    torch.testing.assert_close(resolve(f"{name}-fisher")(evidence) * (1000.0 / 16.0), resolve(name)(evidence))


def test_the_fisher_scale_needs_a_release_that_states_its_batch() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = IVON([p], lr=0.1, ess=10, curvature="signed-fisher")
    with pytest.raises(ValueError, match="curvature='signed-fisher': scales by the expected batch"):
        released(optimizer, {p: torch.ones(3)}, batch=None)
    with pytest.raises(ValueError, match="not a known estimator"):
        resolve("cross-fisher")  # the cross moment has nothing of the Fisher in it


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
    first, second = (IVON([p], lr=0.1, ess=10, curvature=name) for name in ("signed", "averaged"))
    released(first, {p: torch.ones(3)})
    second.load_state_dict(first.state_dict())
    with pytest.raises(dpivon.errors.DpivonError, match="made with another estimator"):
        released(second, {p: torch.ones(3)})
