"""The cost of choosing the best of a random number of runs, against exact divergences, limits and the paper's formulas."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm
from typer.testing import CliRunner

from dpivon import ArgumentError, budget
from dpivon.cli import app
from dpivon.privacy.accounting import (
    RandomRuns,
    epsilon,
    tuned_epsilon,
    tuned_noise_multiplier,
    tuning_costs,
)
from dpivon.privacy.accounting.rdp import WIDE_ORDERS
from dpivon.privacy.accounting.tuning import tuned_curve

ORDERS = np.array(WIDE_ORDERS)
HEAVY = RandomRuns(10.0, "negative-binomial", -0.7)
SEARCHES = [
    RandomRuns(1.0),
    RandomRuns(4.0),
    RandomRuns(30.0),
    RandomRuns(10.0, "logarithmic"),
    HEAVY,
    RandomRuns(10.0, "negative-binomial", 0.5),
    RandomRuns(10.0, "negative-binomial", 3.0),
    RandomRuns(1.5, "poisson"),
    RandomRuns(10.0, "poisson"),
]


def shares(runs: RandomRuns) -> np.ndarray:
    """P[K = k], k = 0, 1, …, from the definitions, term by term."""
    k = np.arange(200_000)
    if runs.law == "poisson":
        from scipy.stats import poisson

        return poisson.pmf(k, runs.mean)
    if runs.log_gamma == 0:
        return np.array([0.0, 1.0])
    gamma, eta = math.exp(runs.log_gamma), runs.eta
    ell = np.arange(len(k) - 1)
    if eta == 0:
        tail = (1 - gamma) ** k[1:] / (k[1:] * math.log(1 / gamma))
    else:
        first = np.log(np.abs((ell + eta) / (ell + 1)))
        tail = np.exp(k[1:] * math.log1p(-gamma) + np.cumsum(first)) / abs(gamma**-eta - 1)
    return np.concatenate([[0.0], tail])


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("runs", SEARCHES, ids=str)
def test_the_law_has_the_mean_it_says_and_draws_follow_it(runs: RandomRuns) -> None:
    p = shares(runs)
    if runs is not HEAVY:  # whose tail is beyond any table
        assert p.sum() == pytest.approx(1.0, abs=1e-9)
        assert (p * np.arange(len(p))).sum() == pytest.approx(runs.mean, rel=1e-6)
    n = 4000
    drawn = np.array([runs.draw() for _ in range(n)])
    for k in range(4):
        expected = p[k] if k < len(p) else 0.0
        assert abs((drawn == k).mean() - expected) <= 5.5 * math.sqrt(expected * (1 - expected) / n) + 1e-12


def divergence(runs: RandomRuns, mu: float, order: float) -> float:
    """D_λ(A(D) ‖ A(D′)) by quadrature, where a run outputs its score, N(μ, 1) or N(0, 1), and A the best of K.

    The best of K has distribution f(F(y)), f the generating function of K; so density f′(F(y)) φ(y − mean).
    """
    p = shares(runs)
    k = np.arange(len(p))
    keep = p * np.maximum(k, 1) > 1e-15
    p, k = p[keep], k[keep]

    def slope(x: float) -> float:
        return float((p * k * np.exp((k - 1) * math.log(max(x, 1e-300)))).sum())

    def integrand(y: float) -> float:
        one, other = slope(norm.cdf(y - mu)), slope(norm.cdf(y))
        logs = order * (math.log(max(one, 1e-300)) + norm.logpdf(y - mu))
        return math.exp(logs + (1 - order) * (math.log(max(other, 1e-300)) + norm.logpdf(y)))

    total = quad(integrand, -9.0, 12.0 + order * abs(mu), limit=400)[0]
    if runs.law == "poisson":
        total += math.exp(-runs.mean)  # no run at all: the same outcome in both worlds
    return math.log(total) / (order - 1)


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("runs", [r for r in SEARCHES if r is not HEAVY], ids=str)
def test_the_bound_holds_for_the_exact_divergence_of_the_best_of_k(runs: RandomRuns) -> None:
    for mu in (0.3, -0.3, 1.0):
        bound = tuned_curve(ORDERS * mu * mu / 2, ORDERS, runs)  # of the Gaussian mechanism
        for order in (2.0, 5.0):
            exact = divergence(runs, mu, order)
            claimed = float(bound[list(WIDE_ORDERS).index(order)])
            assert exact <= claimed + 1e-6
            if runs.mean == 30 and mu == -0.3:
                assert exact > order * mu * mu / 2  # the price is real: the bound of one run does not hold


RUN = [(1.0, 0.01, 1000)]


@pytest.mark.parametrize("law", ["geometric", "logarithmic"])
def test_one_run_for_sure_costs_what_one_run_costs(law: str) -> None:
    assert tuned_epsilon(RUN, 1e-5, RandomRuns(1.0, law)) == epsilon(RUN, 1e-5, "rdp")
    assert tuned_epsilon(RUN, 1e-5, RandomRuns(1.0 + 1e-9, law)) == pytest.approx(epsilon(RUN, 1e-5, "rdp"), rel=1e-6)
    assert RandomRuns(1.0, law).draw() == 1


@pytest.mark.parametrize("law", ["geometric", "logarithmic", "poisson"])
def test_more_runs_steps_or_less_noise_cost_more_and_never_less_than_one_run(law: str) -> None:
    by_mean = [tuned_epsilon(RUN, 1e-5, RandomRuns(m, law)) for m in (1.0, 1.5, 3.0, 10.0, 100.0, 1e4)]
    assert by_mean == sorted(by_mean)
    assert by_mean[0] >= epsilon(RUN, 1e-5, "rdp")
    by_sigma = [tuned_epsilon([(s, 0.01, 1000)], 1e-5, RandomRuns(10.0, law)) for s in (4.0, 2.0, 1.0, 0.6)]
    assert by_sigma == sorted(by_sigma)
    assert tuned_epsilon([(0.0, 0.01, 3)], 1e-5, RandomRuns(10.0, law)) == math.inf
    assert tuned_epsilon([], 1e-5, RandomRuns(10.0, law)) == 0.0


def test_the_geometric_law_by_the_papers_formula_with_its_free_order_chosen_by_hand() -> None:
    """Theorem 2 at η = 1, every term written out, against the least over a grid of λ and λ̂."""
    gamma, delta = 1 / 20, 1e-5
    found = math.inf
    for lam in WIDE_ORDERS:
        for hat in (1.0, *WIDE_ORDERS):
            rho = lam * 0.02 + 2 * (1 - 1 / hat) * hat * 0.02 + 2 * math.log(1 / gamma) / hat + math.log(20) / (lam - 1)
            found = min(found, rho + math.log1p(-1 / lam) - math.log(delta * lam) / (lam - 1))
    assert tuned_epsilon([(5.0, 1.0, 1)], delta, RandomRuns(20.0)) == pytest.approx(found, rel=1e-9)


def test_a_search_is_cheaper_than_publishing_its_runs_and_dearer_than_one() -> None:
    plan = budget(dataset_size=50_000, batch_size=500, steps=1000, delta=1e-5, noise_multiplier=1.0)
    everything, *searches = tuning_costs(plan, 30)
    assert everything.epsilon == epsilon([(1.0, 0.01, 30_000)], 1e-5, "rdp")
    for cost in searches:
        assert plan.epsilon < cost.epsilon < everything.epsilon


def test_the_noise_of_a_search_within_a_target() -> None:
    runs = RandomRuns(20.0, "logarithmic")
    sigma = tuned_noise_multiplier(3.0, 1e-5, 0.01, 1000, runs)
    assert (
        tuned_epsilon([(sigma, 0.01, 1000)], 1e-5, runs)
        <= 3.0
        < tuned_epsilon([(0.99 * sigma, 0.01, 1000)], 1e-5, runs)
    )
    with pytest.raises(ArgumentError, match=r"target_epsilon=1e-09: no noise reaches it"):
        tuned_noise_multiplier(1e-9, 1e-5, 0.01, 1000, runs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mean": 0.5}, "mean=0.5: must be at least 1"),
        ({"mean": math.nan}, "mean=nan"),
        ({"mean": 1e12}, r"mean=1000000000000\.0: is more runs"),
        ({"mean": 3, "law": "uniform"}, "law='uniform'"),
        ({"mean": 3, "law": "negative-binomial"}, "shape=None: does not fit"),
        ({"mean": 3, "shape": 0.5}, r"shape=0\.5: does not fit law='geometric'"),
        ({"mean": 3, "law": "negative-binomial", "shape": -1.0}, r"shape=-1\.0: must be greater than -1"),
        ({"mean": 1e8, "law": "negative-binomial", "shape": -0.999}, r"shape=-0\.999: is too near"),
    ],
)
def test_a_search_that_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        RandomRuns(**arguments)


PLAN = ["budget", "--dataset-size", "50000", "--batch-size", "500", "--steps", "1000", "--delta", "1e-5"]


def test_the_command_prints_the_cost_with_and_without_tuning() -> None:
    result = CliRunner().invoke(app, [*PLAN, "--noise-multiplier", "1", "--accountant", "rdp", "--tuning", "20"])
    one, everything, *searches = result.stdout.splitlines()
    assert one.startswith(f"ε = {epsilon(RUN, 1e-5, 'rdp'):.4g} at δ = 1e-05 (rdp)")
    assert everything.startswith(f"ε = {epsilon([(1.0, 0.01, 20_000)], 1e-5, 'rdp'):.4g} (rdp) if 20 runs")
    for line, law in zip(searches, ("geometric", "logarithmic", "poisson"), strict=True):
        assert line.startswith(
            f"ε = {tuned_epsilon(RUN, 1e-5, RandomRuns(20, law)):.4g} (rdp) with tuning ({law}, 20 runs"
        )


@pytest.mark.slow
def test_the_command_gives_the_noise_that_the_search_needs_as_json() -> None:
    arguments = [*PLAN, "--target-epsilon", "3", "--tuning", "20", "--tuning-law", "logarithmic", "--json"]
    values = json.loads(CliRunner().invoke(app, arguments).stdout)
    fixed, search = values["tuning"]
    assert (fixed["law"], search["law"]) == ("fixed", "logarithmic")
    runs = RandomRuns(20, "logarithmic")
    assert search["epsilon"] > 3.0 >= tuned_epsilon([(search["noise_multiplier"], 0.01, 1000)], 1e-5, runs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tuning", "0.2"], "mean=0.2: must be at least 1"),
        (["--tuning", "nan"], "mean=nan: is not a number"),
        (["--tuning", "4", "--tuning-law", "fixed"], "law='fixed'"),
        (["--tuning-law", "poisson"], "tuning-law='poisson': was given without --tuning"),
    ],
)
def test_the_command_refuses_a_search_that_cannot_be(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [*PLAN, "--noise-multiplier", "1", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
