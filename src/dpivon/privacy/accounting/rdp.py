"""Rényi accounting of the Poisson-subsampled Gaussian mechanism.

One step of noise multiplier σ at sampling rate q satisfies (α, ρ(α))-RDP with ρ(α) = log A_α / (α − 1)
(Mironov, Talwar and Zhang 2019, arXiv:1908.10530, section 3.3). ρ adds up over steps, and (α, ρ)-RDP implies
(ε, δ)-DP with

    ε = ρ + log((α − 1)/α) − (log δ + log α)/(α − 1)

(Balle et al. 2020, arXiv:1905.09982, theorem 21), for every α at once: the smallest ε is the guarantee.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp
from scipy.special import gammaln, logsumexp

from dpivon.errors import bad, check_number
from dpivon.privacy.accounting.history import History, merged

Orders = str | Sequence[float]
Array = NDArray[np.float64]

OPACUS_ORDERS: tuple[float, ...] = tuple(float(order) for order in RDPAccountant.DEFAULT_ALPHAS)
"""The orders Opacus searches; they stop at 63, so that no ε below about 0.12 can be shown at δ = 1e-5."""

_LARGE = (64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
_LARGER = (1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
WIDE_ORDERS: tuple[float, ...] = (
    *(1.001, 1.002, 1.005, 1.01, 1.02, 1.03, 1.05, 1.07),
    *OPACUS_ORDERS,
    *map(float, _LARGE + _LARGER),
)
"""Opacus's orders, lower ones for huge ε, and larger ones for small ε."""
WHOLE_ORDERS = tuple(order for order in WIDE_ORDERS if order.is_integer())
"""Those that take no series: a bound in a tenth of the time, for where a search begins."""


def check_orders(orders: Any) -> tuple[float, ...]:
    """``"wide"``, ``"opacus"`` or a sequence of orders above 1, as a sorted tuple."""
    if isinstance(orders, str):
        if orders in ("wide", "opacus"):
            return WIDE_ORDERS if orders == "wide" else OPACUS_ORDERS
        raise bad("orders", orders, "is not a known set of orders", 'Use "wide", "opacus" or a list of orders')
    fix = "Give Rényi orders greater than 1"
    try:
        values = tuple(orders)
    except TypeError:
        raise bad("orders", orders, "is not a list of orders", fix) from None
    if not values:
        raise bad("orders", orders, "is empty", fix)
    return tuple(sorted({check_number("orders", value, fix, above=1.0) for value in values}))


def _log_a_integer(q: float, sigma: float, order: float) -> float:
    """log Σ_i C(α,i) qⁱ (1−q)^(α−i) exp((i² − i)/(2σ²)) for whole α, in log space throughout.

    Opacus forms the binomial itself, which overflows above α = 1029. The last term bounds the rounding error
    of the log-gammas from above, so that the result never falls below the true value.
    """
    i = np.arange(order + 1.0)
    log_binomial = gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)
    terms = log_binomial + i * math.log(q) + (order - i) * math.log1p(-q) + (i * i - i) / (2 * sigma**2)
    return float(logsumexp(terms)) + 4 * np.finfo(float).eps * order * math.log(order)


def _log_a_between(q: float, sigma: float, order: float) -> float:
    """An upper bound at a fractional order: log A_α is convex in α, and log A_1 = 0."""
    below = math.floor(order)
    left = 0.0 if below == 1 else _log_a_integer(q, sigma, float(below))
    return (below + 1 - order) * left + (order - below) * _log_a_integer(q, sigma, below + 1.0)


def _rdp_of_one_step(q: float, sigma: float, order: float) -> float:
    sigma = min(sigma, 1e100)  # less noise than there is; its square must not overflow
    try:
        if q < 1:
            if order >= 64:
                bound = _log_a_integer if order.is_integer() else _log_a_between
                return bound(q, sigma, order) / (order - 1)
            # Near q = 1/2 the series for fractional orders converges like a power and takes seconds at large σ.
            if sigma > 10 and sigma * abs(math.log(1 / q - 1)) < 8 and not order.is_integer():
                return _log_a_between(q, sigma, order) / (order - 1)
        return float(compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=order))
    except (ArithmeticError, ValueError):
        return math.nan  # the series for a fractional order broke down; the other orders still hold


@lru_cache(maxsize=4096)
def _rdp_per_step(sigma: float, q: float, orders: tuple[float, ...]) -> Array:
    """ρ(α) of one step at every order, +inf where it could not be computed."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        rho = np.array([_rdp_of_one_step(q, sigma, order) for order in orders], dtype=np.float64)
    unknown = np.isnan(rho)
    # ρ never falls as α grows (van Erven and Harremoës 2014): where rounding says otherwise, the larger counts. Not below
    # α = 2, where the division by α − 1 would spread rounding errors to the orders that matter.
    first = int(np.searchsorted(orders, 2.0))
    rho[first:] = np.fmax.accumulate(rho[first:])
    rho = np.maximum(rho, 0.0)
    rho[unknown] = math.inf
    rho.setflags(write=False)
    return rho


def curve(history: History, orders: tuple[float, ...]) -> Array | None:
    """ρ(α) of a whole history; nothing when nothing was released."""
    steps_of = merged(history)
    if not steps_of:
        return None
    total = np.zeros(len(orders))
    for (sigma, q), steps in steps_of.items():
        total += math.inf if sigma == 0 else steps * _rdp_per_step(sigma, q, orders)
    return total


def epsilon(history: History, delta: float, orders: Orders = "wide") -> float:
    """The smallest ε over the orders, by the conversion that Opacus uses (theorem 21 above)."""
    alphas = check_orders(orders)
    rho = curve(history, alphas)
    return 0.0 if rho is None else convert(rho, alphas, delta)


def convert(rho: Array, alphas: tuple[float, ...], delta: float) -> float:
    """(α, ρ(α))-RDP at every order given to the smallest ε at δ."""
    alpha = np.array(alphas)
    candidates = rho + np.log1p(-1 / alpha) - (math.log(delta) + np.log(alpha)) / (alpha - 1)
    return max(float(np.min(np.where(np.isnan(candidates), math.inf, candidates))), 0.0)
