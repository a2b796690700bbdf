"""Lower bounds on ε against closed forms and against mechanisms whose ε is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpivon.audit.tier_c import (
    ALPHA,
    DELTA,
    GUESSES,
    NOTICED,
    expected_bound,
    gaussian_delta,
    gaussian_epsilon,
    mu_lower_bound,
    noticed_deficit,
    one_run_epsilon,
    upper,
)
from dpivon.privacy.accounting import epsilon


def test_the_gaussian_mechanism_is_that_of_the_accountants():
    for sigma in (0.5, 1.0, 3.0):
        exact = gaussian_epsilon(1 / sigma, 1e-5)
        assert gaussian_delta(1 / sigma, exact) == pytest.approx(1e-5, rel=1e-6)
        assert exact <= epsilon([(sigma, 1.0, 1)], 1e-5, "pld") <= exact * 1.001 + 1e-4
    assert gaussian_epsilon(1.0, 1e-5) == pytest.approx(4.377, abs=1e-3)
    assert gaussian_epsilon(1e-7, 1e-5) == 0.0


def test_clopper_and_pearson_cover_as_often_as_they_say():
    """The probability of so few errors, if the rate were the bound, is α."""
    for errors, trials in ((0, 50), (3, 50), (49, 50)):
        assert stats.binom.cdf(errors, trials, upper(errors, trials, 0.01)) == pytest.approx(0.01, rel=1e-6)
    assert upper(50, 50, 0.01) == 1.0


def test_a_bound_exceeds_the_truth_no_more_often_than_alpha():
    generator = np.random.default_rng(0)
    over = 0
    for _ in range(2000):
        false, misses = generator.binomial(400, stats.norm.cdf(-0.5), 2)
        over += mu_lower_bound(int(false), 400, int(misses), 400, 0.1) > 1.0
    assert over / 2000 < 0.1 + 3 * math.sqrt(0.09 / 2000)


def test_the_expected_bound_and_the_power_are_those_of_the_specification():
    assert expected_bound(1.0, 10_000, 1e-5, 1e-6) == pytest.approx(3.75, abs=0.03)
    assert expected_bound(0.8, 10_000, 1e-5, 1e-6) > 4.378  # noise too small by 1.25 is seen
    claimed = gaussian_epsilon(1.0, DELTA)
    assert noticed_deficit(1.0, GUESSES // 2, claimed, DELTA, ALPHA) == pytest.approx(NOTICED, abs=0.006)


def test_one_run_is_randomised_response_where_that_is_the_mechanism():
    """m bits, each told truly with probability e^ε/(1 + e^ε): the bound is below ε and near it for many bits."""
    for eps in (0.5, 1.0, 3.0):
        m = 20_000
        correct = round(m / (1 + math.exp(-eps)))
        assert 0.9 * eps < one_run_epsilon(m, m, correct, 0.0, 0.01) < eps
    assert one_run_epsilon(1000, 200, 100, 1e-5, 0.01) == 0.0
    assert one_run_epsilon(1000, 200, 195, 1e-5, 0.01) < one_run_epsilon(1000, 200, 195, 0.0, 0.01)
