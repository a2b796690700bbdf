"""Every accountant against values computed by other implementations, and against each other."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from scipy.optimize import brentq
from scipy.stats import norm

from dpivon.errors import PrivacyWarning
from dpivon.privacy.accounting import ACCOUNTANTS, epsilon, pld, prv, rdp
from dpivon.privacy.accounting.history import History

# q, σ, T, δ, classic RDP, improved RDP, PLD, PRV low, PRV high
TABLE = [
    (256 / 60000, 1.1, 14062, 1e-5, 3.008, 2.5966, 2.3817, 2.3715, 2.3917),
    (256 / 60000, 1.3, 3515, 1e-5, 1.192, 0.9544, 0.8645, 0.8544, 0.8745),
    (256 / 60000, 0.7, 10546, 1e-5, 7.100, 6.318, 5.639, 5.629, 5.650),
    (240 / 60000, 1.1, 15000, 1e-5, 2.905, 2.5029, 2.2955, 2.285, 2.306),
    (0.04, 1.5, 2250, 1e-5, 8.074, 7.32911, 6.769, 6.758, 6.779),
    (0.0025, 1.3, 6000, 1e-5, 0.942, 0.72422, 0.6401, 0.630, 0.650),
    (0.001, 1.0, 30000, 1e-7, 1.709, 1.41550, 1.098, 1.088, 1.108),
    (0.01, 4.0, 10000, 1e-5, 1.259, 1.0355, 0.947, 0.937, 0.957),
    (1.0, 10.0, 100, 1e-5, 5.299, 4.7285, 4.3772, 4.367, 4.387),
]
HALF_A_DIGIT = 6e-4


def classic_epsilon(history: History, delta: float) -> float:
    """ε = min_α ρ(α) + log(1/δ)/(α − 1) (Mironov 2017, proposition 3): looser, as older papers report it."""
    alphas = rdp.check_orders("opacus")
    rho = rdp.curve(history, alphas)
    assert rho is not None
    return float(np.nanmin(rho - math.log(delta) / (np.array(alphas) - 1)))


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(("q", "sigma", "steps", "delta", "classic", "improved", "tight", "low", "high"), TABLE)
def test_reference_table(
    q: float,
    sigma: float,
    steps: int,
    delta: float,
    classic: float,
    improved: float,
    tight: float,
    low: float,
    high: float,
) -> None:
    history = [(sigma, q, steps)]
    assert classic_epsilon(history, delta) == pytest.approx(classic, abs=HALF_A_DIGIT)
    assert epsilon(history, delta, "rdp", "opacus") == pytest.approx(improved, abs=2e-4)
    by_pld = epsilon(history, delta, "pld")
    assert by_pld == pytest.approx(tight, abs=HALF_A_DIGIT)
    by_prv = prv.bounds(history, delta)
    assert by_prv[0] == pytest.approx(low, abs=HALF_A_DIGIT)
    assert by_prv[2] == pytest.approx(high, abs=HALF_A_DIGIT)
    assert epsilon(history, delta, "prv") == by_prv[2]
    assert by_prv[0] <= by_pld <= by_prv[2]
    assert (
        by_pld
        <= epsilon(history, delta, "rdp", orders="wide")
        <= epsilon(history, delta, "rdp", orders="opacus")
        <= classic_epsilon(history, delta)
    )


GRID = {
    128: (172671, 3.797, 0.479, 0.225, 0.157),
    256: (161881, 5.688, 0.699, 0.327, 0.211),
    512: (139063, 8.594, 1.020, 0.476, 0.307),
}


@pytest.mark.parametrize(
    ("batch", "sigma", "expected"),
    [
        (batch, sigma, value)
        for batch, row in GRID.items()
        for sigma, value in zip((0.1, 1.0, 5.0, 10.0, 15.0), row, strict=True)
    ],
)
def test_the_papers_grid(batch: int, sigma: float, expected: float) -> None:
    history = [(sigma, batch / 50000, 150 * math.ceil(50000 / batch))]
    assert epsilon(history, 1e-5, "rdp", orders="opacus") == pytest.approx(
        expected, abs=0.5 if expected > 1e3 else 6e-4
    )
    assert epsilon(history, 1e-5, "rdp", orders="wide") <= epsilon(history, 1e-5, "rdp", orders="opacus")


def test_wider_orders_reach_smaller_epsilon() -> None:
    assert epsilon([(15.0, 128 / 50000, 58650)], 1e-5, "rdp") == pytest.approx(0.145, abs=6e-4)


def test_large_orders_agree_with_opacus_where_it_does_not_overflow() -> None:
    from opacus.accountants.analysis.rdp import compute_rdp

    for order in (64.0, 256.0, 1000.0):
        theirs = compute_rdp(q=0.01, noise_multiplier=20.0, steps=1, orders=order)
        ours = rdp._rdp_of_one_step(0.01, 20.0, order)
        assert theirs * (1 - 1e-9) <= ours <= theirs * (1 + 1e-6)
    assert math.isfinite(rdp._rdp_of_one_step(0.01, 20.0, 8192.0))


def test_the_bound_between_orders_is_above_the_series_and_close() -> None:
    from opacus.accountants.analysis.rdp import compute_rdp

    for order in (1.5, 2.5, 7.3):
        series = compute_rdp(q=0.5, noise_multiplier=12.0, steps=1, orders=order)
        bound = rdp._log_a_between(0.5, 12.0, order) / (order - 1)
        assert series <= bound <= series * 1.5


def gaussian_epsilon(sigma: float, steps: int, delta: float) -> float:
    """Solve δ(ε) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2), μ = √T/σ (Balle and Wang 2018, arXiv:1805.06530)."""
    mu = math.sqrt(steps) / sigma

    def excess(value: float) -> float:
        return float(norm.cdf(-value / mu + mu / 2) - math.exp(value + norm.logcdf(-value / mu - mu / 2)) - delta)

    return float(brentq(excess, 0.0, 1e3, xtol=1e-12))


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize(("sigma", "steps"), [(10.0, 100), (1.0, 1), (5.0, 1), (20.0, 1000), (2.0, 50)])
@pytest.mark.parametrize("delta", [1e-5, 1e-9])
def test_without_sampling_it_is_the_analytic_gaussian(sigma: float, steps: int, delta: float) -> None:
    exact = gaussian_epsilon(sigma, steps, delta)
    for rate in (1.0, 1 - 1e-12):  # the second takes the general path, with its transform
        value = epsilon([(sigma, rate, steps)], delta, "pld")
        assert exact - 1e-7 <= value <= exact * 1.001 + 1e-3
    assert epsilon([(sigma, 1.0, steps)], delta, "prv") >= exact if delta > 1e-8 else True
    assert epsilon([(sigma, 1.0, steps)], delta, "rdp") >= exact


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(("sigma", "q"), [(0.1, 0.5), (0.3, 0.001), (0.3, 0.9), (1.0, 0.01), (5.0, 0.3)])
def test_one_sampled_step_is_never_below_its_exact_value(sigma: float, q: float) -> None:
    """Removing a record from one sampled step: δ(ε) = q δ_Gauss(log(1 + (e^ε − 1)/q)) (Balle et al. 2018)."""
    exact = math.log1p(q * math.expm1(gaussian_epsilon(sigma, 1, 1e-5 / q)))
    history = [(sigma, q, 1)]
    assert exact - 1e-6 <= epsilon(history, 1e-5, "pld") <= exact * 1.001 + 1e-3
    assert exact <= prv.bounds(history, 1e-5)[2]
    assert exact <= epsilon(history, 1e-5, "rdp")


def test_mixed_histories_agree() -> None:
    history = [(1.1, 0.004, 3000), (1.5, 0.01, 500), (1.1, 0.004, 1000), (8.0, 1.0, 3)]
    low, _, high = prv.bounds(history, 1e-5)
    by_pld = epsilon(history, 1e-5, "pld")
    assert low <= by_pld <= high
    by_rdp = epsilon(history, 1e-5, "rdp")
    assert by_pld <= by_rdp <= sum(epsilon([row], 1e-5 / 4, "rdp") for row in history)


def test_a_row_may_be_split_and_reordered() -> None:
    whole = [(1.1, 0.004, 1000), (2.0, 0.01, 100)]
    split = [(1.1, 0.004, 400), (2.0, 0.01, 100), (1.1, 0.004, 600)]
    for accountant in ("rdp", "pld", "prv"):
        assert epsilon(split, 1e-5, accountant) == epsilon(whole, 1e-5, accountant)


def test_huge_epsilon_by_pld_is_quick_and_pessimistic() -> None:
    history = [(0.1, 128 / 50000, 58650)]
    assert pld.interval(history) > 1e-2
    value = epsilon(history, 1e-5, "pld")
    # composed on a grid a hundred times finer than the one in use, ε is between 8952 and 8954
    assert 8952 <= value <= epsilon(history, 1e-5, "rdp")
    # 10 steps that sample a record with probability 0.1 do so more than 5 times with probability 1.5e-4 > δ
    assert epsilon([(1e-3, 0.1, 10)], 1e-5, "pld") >= 6 * 0.5e6


@pytest.mark.parametrize(
    ("sigma", "q", "spacing"),
    [(1.0, 0.03, 1e-3), (0.5, 0.2, 1e-3), (10.0, 0.5, 1e-4), (0.1, 0.9, 1e-1), (3.0, 1e-3, 1e-5), (1.0, 1.0, 1e-2)],
)
def test_the_loss_of_a_release_is_that_of_dp_accounting(sigma: float, q: float, spacing: float) -> None:
    theirs = from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=spacing)
    ours = pld._one(sigma, q, spacing)
    at = np.sort(np.concatenate([np.linspace(-2, 12, 29) * spacing, np.linspace(0, 3 / sigma**2, 31)]))
    np.testing.assert_allclose(ours.get_delta_for_epsilon(at), theirs.get_delta_for_epsilon(at), rtol=1e-9, atol=1e-13)
    assert ours._symmetric == theirs._symmetric


def test_pld_is_that_of_dp_accounting() -> None:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    history = [(1.4, 0.02, 300), (6.0, 1.0, 4)]
    theirs = PLDAccountant(value_discretization_interval=pld.interval(history))
    theirs.compose(dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(1.4)), 300)
    theirs.compose(dp_accounting.GaussianDpEvent(6.0), 4)
    assert pld.epsilon(history, 1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-9)


def test_a_coarser_grid_is_never_below_a_finer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [(1.3, 0.0025, 600)]
    values = []
    for spacing in (1e-4, 1e-3, 1e-2, 1e-1):
        monkeypatch.setattr(pld, "interval", lambda _, spacing=spacing: spacing)
        values.append(pld.epsilon(history, 1e-5))
    assert values == sorted(values)


def test_prv_falls_back_loudly_when_the_grid_is_too_large() -> None:
    history = [(0.1, 128 / 50000, 58650)]
    with pytest.warns(PrivacyWarning, match=r"PRV.*grid points"):
        value = epsilon(history, 1e-5, "prv")
    assert value == epsilon(history, 1e-5, "rdp")


def test_prv_falls_back_loudly_when_rounding_would_matter() -> None:
    history = [(1.0, 0.01, 1000)]
    with pytest.warns(PrivacyWarning, match=r"PRV.*rounding.*delta"):
        assert epsilon(history, 1e-12, "prv") == epsilon(history, 1e-12, "rdp")


@pytest.mark.parametrize("name", ["pld", "prv"])
@pytest.mark.parametrize("outcome", [math.nan, math.inf, RuntimeError("no"), MemoryError("no")])
def test_a_numerical_failure_gives_the_rdp_bound(name: str, outcome: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> object:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setitem(ACCOUNTANTS, name, replace(ACCOUNTANTS[name], bound=fail))
    history = [(1.0, 0.01, 100)]
    with pytest.warns(PrivacyWarning, match="found no bound"):
        assert epsilon(history, 1e-5, name) == rdp.epsilon(history, 1e-5)


def test_pld_where_delta_is_below_its_truncation() -> None:
    with pytest.warns(PrivacyWarning, match="PLD"):
        assert epsilon([(1.0, 0.01, 1000)], 1e-15, "pld") == epsilon([(1.0, 0.01, 1000)], 1e-15, "rdp")
