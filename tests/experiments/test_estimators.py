"""Estimators of the ablations: closed forms, and that a plug-in is accepted by its name everywhere."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from experiments.strong_privacy.estimators import (
    CrossMoment,
    Floored,
    PooledReparameterised,
    RankOne,
    ShrunkRankOne,
    Signed,
)
from tests.methods.test_stacked_methods import check_row, options_of
from tests.optim.estimator_trials import RHO, S2, after, cdf, close, known, normals, phi, squared_weights
from torch import Tensor, nn

from dpivon import IVON, DpivonError
from dpivon.optim.curvature import ESTIMATORS, Averaged, EmpiricalBayes, Evidence, SquaredGradient, register, resolve
from dpivon.study.plan.config import resolve as read_study


@pytest.mark.parametrize("signal", [0.0, 0.3])
def test_signed_is_unbiased_with_the_variance_of_a_square(signal: float) -> None:
    g = signal + math.sqrt(S2) * normals(1, 1, 200, 1000)
    close(Signed()(after(Signed(), g)), signal**2, 2 * S2**2 + 4 * signal**2 * S2)


@pytest.mark.parametrize("z", [0.0, 1.5])
def test_the_floor_costs_what_its_docstring_says(z: float) -> None:
    steps, rho = 400, 0.995
    e = S2 * math.sqrt(2 * squared_weights(rho, steps))
    # The average of many χ² is nearly normal; take it as given and check the floor alone.
    evidence = after(Floored(), math.sqrt(S2) * normals(1, 1, 10, 10), decay=rho)
    a = z * e + e * normals(1, 300, 1000, seed=3)
    evidence = replace(evidence, t=steps, memory=known(a, e, steps, rho))
    assert float(Floored().standard_error(evidence).max()) == pytest.approx(e)
    c = 1 - z
    mean = e * (c * cdf(c) + phi(c)) + z * e
    second = e**2 * (1 * cdf(1) + phi(1) + 1 - cdf(1)) if z == 0.0 else None
    close(Floored()(evidence), mean, None if second is None else second - mean**2)
    assert float(Floored()(evidence).min()) == pytest.approx(e)


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


def test_equal_curvature_pooled_by_rank_one_has_the_variance_of_rows_and_columns() -> None:
    rows, columns, v = 8, 20, 1.0
    evidence = after(RankOne(), normals(20, 1, 2, 2))
    e = 0.05
    a = v + e * normals(4000, rows, columns, seed=2)
    got = RankOne()(replace(evidence, noise_variance=0.0, memory=known(a, 0.0)))
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
    assert float(ShrunkRankOne().standard_error(evidence).max()) == pytest.approx(e)
    a = 1.0 + e * normals(4000, n, k, seed=2)
    got = ShrunkRankOne()(replace(evidence, memory=known(a, e)))
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


# ---- as plug-ins


STUDY = """
name: plug-in
dataset: digits
network: compact
split: final
epochs: 1
delta: 1.0e-3
mc_samples: 2
seeds: 1
grid: {batch_size: [64], noise_multiplier: [1.0], max_grad_norm: [1.0]}
methods:
  - {method: dp-steady, lr: 3.5, options: {curvature: NAME}}
"""
NAMES = [f"{kind.base}{scale}" for kind in (Signed, Floored, RankOne, ShrunkRankOne) for scale in ("", "-fisher")]


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("name", [*NAMES, "cross", "reparam-pooled"])
def test_an_optimizer_and_a_stack_take_a_plug_in_by_its_name_and_agree(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(40, 2, 2, 3, generator=generator), torch.randint(3, (40,), generator=generator)
    check_row("dp-ivon-gradsq", {**options_of("dp-ivon-gradsq"), "curvature": name}, data)
    if name != "reparam-pooled":
        check_row("dp-calm", {**options_of("dp-calm"), "curvature": name, "ema": 0.7}, data)
    assert IVON([nn.Parameter(torch.ones(2))], lr=0.1, ess=8, curvature=name).curvature is resolve(name)


def test_a_study_takes_a_plug_in_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(STUDY.replace("NAME", "rank-one-shrunk-fisher"))
    (run,) = read_study(file).runs
    assert run.options == {"curvature": "rank-one-shrunk-fisher"}
    file.write_text(STUDY.replace("NAME", "cross-fisher"))  # the cross moment has nothing of the Fisher in it
    with pytest.raises(DpivonError, match="curvature='cross-fisher': is not a known estimator"):
        read_study(file)


def test_a_name_belongs_to_one_estimator() -> None:
    class Impostor(SquaredGradient):
        name = "signed"

    register(Signed())  # idempotent
    with pytest.raises(DpivonError, match="curvature='signed': is the name of another estimator"):
        register(Impostor())
    with pytest.raises(DpivonError, match="is not a curvature estimator"):
        register(Signed)  # type: ignore[arg-type]
    assert isinstance(ESTIMATORS["signed"], Signed)
