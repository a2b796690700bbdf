"""Lower bounds on ε from how well an attacker guesses."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats
from scipy.optimize import brentq


def gaussian_delta(mu: float, eps: float) -> float:
    """δ(ε) of a Gaussian mechanism whose worlds are N(0, 1) and N(μ, 1): Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2)."""
    first = stats.norm.cdf(-eps / mu + mu / 2)
    return float(first - math.exp(eps + stats.norm.logcdf(-eps / mu - mu / 2)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The ε of that mechanism at δ, exactly; 0 where δ allows any guess that good."""
    if mu <= 0 or gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    top = 1.0
    while gaussian_delta(mu, top) > delta:
        top *= 2
    return float(brentq(lambda eps: gaussian_delta(mu, eps) - delta, 0.0, top, xtol=1e-10))


def upper(errors: int, trials: int, alpha: float) -> float:
    """Clopper and Pearson's upper bound on a probability, at level α."""
    return 1.0 if errors >= trials else float(stats.beta.ppf(1 - alpha, errors + 1, trials - errors))


def mu_lower_bound(false_positives: int, negatives: int, misses: int, positives: int, alpha: float) -> float:
    """μ ≥ Φ⁻¹(1 − FPR↑) − Φ⁻¹(FNR↑) with confidence 1 − α (Nasr et al., 2023)."""
    fpr, fnr = upper(false_positives, negatives, alpha / 2), upper(misses, positives, alpha / 2)
    return float(stats.norm.ppf(1 - fpr) - stats.norm.ppf(fnr))


def expected_bound(sigma: float, trials: int, delta: float, alpha: float) -> float:
    """The bound that a correct engine is expected to get from so many guesses in either world."""
    errors = round(trials * stats.norm.cdf(-0.5 / sigma))
    return gaussian_epsilon(mu_lower_bound(errors, trials, errors, trials, alpha), delta)


def noticed_deficit(sigma: float, trials: int, claimed: float, delta: float, alpha: float) -> float:
    """The smallest factor by which noise may be too small so that the expected bound passes the claim."""
    factor = 1.0
    while factor < 64 and expected_bound(sigma / factor, trials, delta, alpha) <= claimed:
        factor *= 1.01
    return factor


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, alpha: float) -> float:
    """The largest ε that so many correct guesses about canaries of one training run refute at level α.

    Each canary was in or out by a fair coin; the attacker guesses some of them. Under (ε, δ) the number of correct ones is
    dominated by a binomial with success e^ε/(1 + e^ε), up to a term in δ (Steinke, Nasr and Jagielski, *Privacy auditing
    with one (1) training run*, 2023, theorem 5.2).
    """

    def p_value(eps: float) -> float:
        success = 1 / (1 + math.exp(-eps))
        beta = float(stats.binom.sf(correct - 1, guesses, success))
        i = np.arange(1, correct + 1)
        slope = float((np.cumsum(stats.binom.pmf(correct - i, guesses, success)) / i).max(initial=0.0))
        return min(1.0, beta + slope * delta * 2 * canaries)

    if p_value(0.0) > alpha:
        return 0.0
    top = 1.0
    while p_value(top) < alpha and top < 64:
        top *= 2
    return float(brentq(lambda eps: p_value(eps) - alpha, 0.0, top, xtol=1e-4))
