"""What must hold for every history: more noise never costs more, more data or steps never cost less."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpivon.privacy.accounting import ACCOUNTANTS, epsilon

sigmas = st.floats(0.4, 30.0)
rates = st.floats(1e-4, 1.0)
lengths = st.integers(1, 20000)
deltas = st.floats(1e-9, 1e-2)
factors = st.floats(1.01, 3.0)
# the grids follow the history, so that two tight bounds may differ by a little in either direction
SLACK = {"rdp": (1e-9, 1e-9), "pld": (2e-2, 1e-3)}


def at_most(smaller: float, larger: float, accountant: str) -> bool:
    relative, absolute = SLACK[accountant]
    return smaller <= larger * (1 + relative) + absolute


def check_monotone(sigma: float, q: float, steps: int, delta: float, factor: float, accountant: str) -> None:
    base = epsilon([(sigma, q, steps)], delta, accountant)
    assert base >= 0
    assert at_most(epsilon([(sigma * factor, q, steps)], delta, accountant), base, accountant)
    assert at_most(epsilon([(sigma, q / factor, steps)], delta, accountant), base, accountant)
    assert at_most(base, epsilon([(sigma, q, math.ceil(steps * factor))], delta, accountant), accountant)
    assert at_most(epsilon([(sigma, q, steps)], delta * factor, accountant), base, accountant)


@pytest.mark.slow
@given(sigmas, rates, lengths, deltas, factors)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_rdp_is_monotone(sigma: float, q: float, steps: int, delta: float, factor: float) -> None:
    check_monotone(sigma, q, steps, delta, factor, "rdp")


@pytest.mark.slow
@given(sigmas, rates, lengths, deltas, factors)
@settings(max_examples=3, deadline=None, derandomize=True)
def test_pld_is_monotone(sigma: float, q: float, steps: int, delta: float, factor: float) -> None:
    check_monotone(sigma, q, steps, delta, factor, "pld")


@pytest.mark.slow
@given(sigmas, rates, lengths, deltas)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_order_of_the_bounds(sigma: float, q: float, steps: int, delta: float) -> None:
    history = [(sigma, q, steps)]
    wide, opacus = epsilon(history, delta, "rdp"), epsilon(history, delta, "rdp", orders="opacus")
    assert epsilon(history, delta, "pld") <= wide <= opacus


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_nothing_released_costs_nothing(accountant: str) -> None:
    assert epsilon([], 1e-5, accountant) == 0
    assert epsilon([(1.0, 0.01, 0)], 1e-5, accountant) == 0
    assert epsilon([(0.0, 0.01, 0)], 1e-5, accountant) == 0


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_no_noise_has_no_guarantee(accountant: str) -> None:
    assert epsilon([(0.0, 0.01, 1)], 1e-5, accountant) == math.inf
    assert epsilon([(1.0, 0.01, 100), (0.0, 0.01, 1)], 1e-5, accountant) == math.inf


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_never_negative_at_large_delta(accountant: str) -> None:
    assert epsilon([(5.0, 0.01, 10)], 0.9, accountant) == 0
