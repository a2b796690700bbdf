"""Privacy loss distributions: the loss of one step on a grid, composed by fast Fourier transform.

The grid is built by "connect the dots" (Doroshenko et al. 2022, arXiv:2207.04380), which keeps the
hockey-stick divergence exact on the grid and larger between its points. A coarser grid therefore
gives a larger ε, never a smaller one, and adding and removing a record are both composed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from dpivon.privacy.accounting import rdp
from dpivon.privacy.accounting.accountants import NoBound
from dpivon.privacy.accounting.history import Entry, History, merged

FINEST, COARSEST = 1e-7, 1e-4
IN_A_SEARCH = 5e-4
"""The coarsest grid where σ is searched for: ε is larger by about 1e-4 of itself at most, in a third of the time."""
MAX_POINTS = 2**19
"""Points on the grid: about a second and some tens of megabytes for each distinct (σ, q)."""


_coarsest: ContextVar[float] = ContextVar("coarsest", default=COARSEST)


@contextmanager
def searching() -> Iterator[None]:
    """Where many σ are tried: a coarser grid, whose ε is an upper bound as well."""
    token = _coarsest.set(IN_A_SEARCH)
    try:
        yield
    finally:
        _coarsest.reset(token)


def _spread(sigma: float, q: float) -> float:
    """The standard deviation of one step's loss, about q √(exp(1/σ²) − 1)."""
    return q * math.sqrt(math.expm1(min(1 / sigma**2, 50.0)))


def _range(sigma: float, q: float) -> float:
    """The largest loss of one step, up to a mass of exp(−50), as the tail bound of dp_accounting has it."""
    return max(0.0, 0.5 / sigma**2 + 10 / sigma + math.log(q)) - math.log1p(-q * (1 - 1e-9))


def interval(history: History) -> float:
    """The grid's spacing: a tenth of one step's spread, but few enough points for the composed loss.

    The composed loss lies within ±ε(1e-15) up to a mass of 1e-15, which dp_accounting moves to infinity.
    """
    rows = list(merged(history))
    fine = min(_spread(sigma, q) for sigma, q in rows) / 10
    orders = rdp.WIDE_ORDERS if _coarsest.get() == COARSEST else rdp.WHOLE_ORDERS
    extent = 2 * rdp.epsilon(history, 1e-15, orders) + 2 * max(_range(sigma, q) for sigma, q in rows)
    return max(min(max(fine, FINEST), _coarsest.get()), extent / MAX_POINTS)


@lru_cache(maxsize=8)
def _one(sigma: float, q: float, spacing: float) -> Any:
    """The loss of one release. It takes most of the time and does not depend on the number of steps."""
    from dp_accounting.pld.privacy_loss_distribution import (
        from_gaussian_mechanism,
    )  # here: training itself needs it not

    return from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=spacing)


@lru_cache(maxsize=1024)
def _composed(rows: tuple[Entry, ...], spacing: float, delta: float) -> float:
    total: Any = None
    for sigma, q, steps in rows:
        # Without sampling, T steps are one Gaussian of σ/√T and need no transform.
        part = _one(sigma / math.sqrt(steps), q, spacing) if q == 1 else _one(sigma, q, spacing).self_compose(steps)
        total = part if total is None else total.compose(part)
    return float(total.get_epsilon_for_delta(delta))


def epsilon(history: History, delta: float) -> float:
    """The PLD bound of ε, for a history that releases something and has noise in every row."""
    rows = tuple((sigma, q, steps) for (sigma, q), steps in merged(history).items())
    if all(q < 1 for _, q, _ in rows):
        sampled = -math.expm1(sum(steps * math.log1p(-q) for _, q, steps in rows))
        if sampled < delta * (1 - 1e-9):
            return 0.0  # δ covers ever being sampled
    value = _composed(rows, interval(history), delta)
    if value < 0:
        raise NoBound(f"it returned {value}")
    return value
