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

import numpy as np

from dpivon.privacy.accounting import rdp
from dpivon.privacy.accounting.accountant import NoBound
from dpivon.privacy.accounting.history import Entry, History, merged
from dpivon.privacy.accounting.rdp import Array

FINEST, COARSEST = 1e-7, 1e-4
IN_A_SEARCH = 5e-4
"""The coarsest grid where σ is searched for: ε is larger by about 1e-4 of itself at most, in a third of the time."""
MAX_POINTS = 2**19
"""Points on the grid: about a quarter of a second and some tens of megabytes for each distinct (σ, q)."""
WIDEST = 700.0
"""Beyond it exp(spacing) overflows: an ε of hundreds of millions."""


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


def _deltas(mechanism: Any, epsilons: Array, removed: bool) -> Array:
    """δ at every ε, as ``mechanism.get_delta_for_epsilon``, which finds one point x of loss ε at a time, in Python."""
    sigma, q = mechanism.standard_deviation, mechanism.sampling_prob
    loss = epsilons if removed else -epsilons
    inside = loss > math.log1p(-q) if q < 1 else np.full(loss.shape, True)
    loss, deltas = loss[inside], -np.expm1(np.minimum(epsilons, 0.0)) if removed else np.zeros(len(epsilons))
    if q < 1:  # log(1 + (exp(loss) − 1)/q): the loss without sampling
        whole = loss + np.log(1 / q)
        with np.errstate(divide="ignore"):
            whole += np.log1p(-np.exp(np.minimum(np.log(1 / q - 1) - whole, 0.0)))
        loss = np.where(np.isclose(loss, math.log(1 - q), rtol=1e-9, atol=0.0), -math.inf, whole)
    x = -0.5 - loss * sigma**2 if removed else 1 + (-0.5 + loss * sigma**2)
    deltas[inside] = mechanism.mu_upper_cdf(x) - np.exp(epsilons[inside] + mechanism.mu_lower_log_cdf(x))
    return np.clip(deltas, 0.0, 1.0)


@lru_cache(maxsize=8)
def _one(sigma: float, q: float, spacing: float) -> Any:
    """The loss of one release, as ``from_gaussian_mechanism``. It does not depend on the number of steps."""
    # here: training itself needs none of it
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap as connected
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    def one_way(kind: Any) -> Any:
        mechanism = GaussianPrivacyLoss(sigma, sampling_prob=q, adjacency_type=kind)
        bounds = mechanism.connect_dots_bounds()
        low, high = math.floor(bounds.epsilon_lower / spacing), math.ceil(bounds.epsilon_upper / spacing)
        grid = np.arange(low, high + 1) * spacing
        return connected(spacing, low, high, _deltas(mechanism, grid, kind == AdjacencyType.REMOVE))

    return PrivacyLossDistribution(*map(one_way, [AdjacencyType.REMOVE, AdjacencyType.ADD][: 1 if q == 1 else 2]))


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
    spacing = interval(history)
    if spacing > WIDEST:
        raise NoBound(f"its grid would have a spacing of {spacing:.3g}")
    value = _composed(rows, spacing, delta)
    if value < 0:
        raise NoBound(f"it returned {value}")
    return value
