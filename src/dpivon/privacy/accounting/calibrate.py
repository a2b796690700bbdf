"""The least noise that keeps a run inside its budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from dpivon.errors import PrivacyWarning, bad, check_number, check_whole
from dpivon.privacy.accounting.accountant import check_accountant, check_delta, epsilon
from dpivon.privacy.accounting.history import History, check_entry, check_history
from dpivon.privacy.accounting.rdp import Orders, check_orders

SMALLEST, LARGEST = 5e-4, 1e8
TOLERANCE = 1e-3


def _least(fits: Callable[[float], bool], high: float, shrink: float) -> float:
    """Bisection between a σ that fits and one that does not, down to a relative gap of ``TOLERANCE``."""
    if fits(SMALLEST):
        return SMALLEST  # where δ covers ever being sampled, every σ fits
    low = max(high * shrink, SMALLEST)
    while fits(low):
        low, high = max(low * shrink, SMALLEST), low
    while high > low * (1 + TOLERANCE):
        middle = (low * high) ** 0.5
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def calibrated(target: float, spent: Callable[[float], float]) -> float:
    """The smallest σ, to ``TOLERANCE``, at which ``spent(σ)``, which falls in σ, is at most ``target``."""
    least = spent(LARGEST)
    if least > target:
        raise bad(
            "target_epsilon",
            target,
            f"no noise reaches it, the smallest ε that can be shown being {least:.6g}",
            "Raise target_epsilon or delta, or use wider orders",
        )
    high = 1.0
    while spent(high) > target:
        high = min(2 * high, LARGEST)
    return _least(lambda value: spent(value) <= target, high, 0.5)


def noise_multiplier(
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "rdp",
    orders: Orders = "wide",
    also: History | None = None,
) -> float:
    """The smallest σ, to one part in a thousand, whose ε after ``steps`` steps, and ``also``, is at most ``target_epsilon``.

    ε(σ*) ≤ target < ε(0.99 σ*): the side that is returned was itself accounted, never interpolated.

    Args:
        target_epsilon: ε to stay within.
        delta: δ.
        sample_rate: q.
        steps: T.
        accountant: ``"rdp"``, ``"prv"`` or ``"pld"``.
        orders: Rényi orders of ``"rdp"``.
    """
    fix = "Give a target ε greater than 0"
    target = check_number("target_epsilon", target_epsilon, fix, above=0.0)
    name, probability, alphas = check_accountant(accountant), check_delta(delta), check_orders(orders)
    _, rate, _ = check_entry(1.0, sample_rate, steps)
    number = check_whole("steps", steps, "Give at least one step to calibrate for", at_least=1)
    beside = check_history(also or [])

    def spent(sigma: float, by: str) -> float:
        return epsilon([(sigma, rate, number), *beside], probability, by, alphas if by == "rdp" == name else "wide")

    with warnings.catch_warnings():
        # A candidate that an accountant gives up on is bounded by RDP; only the result is worth a warning.
        warnings.simplefilter("ignore", PrivacyWarning)
        sigma = calibrated(target, lambda value: spent(value, "rdp"))
        if name != "rdp":
            sigma = _least(lambda value: spent(value, name) <= target, sigma, 0.85)
    if name != "rdp":
        spent(sigma, name)
    return sigma
