"""Privacy loss random variables (Gopi, Lee and Wutschitz 2021, arXiv:2106.02848), from Opacus.

The density of the summed privacy loss is computed on a grid of spacing h over [−L, L]; ε is then known to
within ``EPSILON_ERROR`` at a δ known to within δ/1000, and the upper end is returned.
Opacus composes the loss of removing a record only; PLD composes adding one too.
"""

from __future__ import annotations

import math

import numpy as np
from opacus.accountants.analysis.prv import (
    Domain,
    PoissonSubsampledGaussianPRV,
    TruncatedPrivacyRandomVariable,
    compose_heterogeneous,
    discretize,
)

from dpivon.privacy.accounting import rdp
from dpivon.privacy.accounting.accountant import NoBound
from dpivon.privacy.accounting.history import History, merged

EPSILON_ERROR = 0.01
MAX_POINTS = 2**23
"""Points on the grid: about a gigabyte of working memory."""


def _grid(history: History, delta: float, delta_error: float) -> Domain:
    """Remark 5.6: L bounds the total loss and that of each step, h = ε_err / √(T log(12/δ_err)/2).

    The size is known before anything is allocated, which is when it is refused.
    """
    steps_of = merged(history)
    total = sum(steps_of.values())
    extent = rdp.epsilon(history, delta_error / 4)
    for sigma, q in steps_of:
        extent = max(extent, rdp.epsilon([(sigma, q, 1)], delta_error / (8 * total)))
    extent = max(extent, EPSILON_ERROR) + 3
    spacing = EPSILON_ERROR / math.sqrt(total * math.log(12 / delta_error) / 2)
    points = 2 * extent / spacing
    if points > MAX_POINTS:
        raise NoBound(f"it would need {points:.2g} grid points, more than {MAX_POINTS:.2g}")
    # Opacus compares δ to the precision of long doubles, but its sums are of doubles.
    if points * np.finfo(np.float64).eps > delta / 10:
        raise NoBound(f"rounding over {points:.2g} grid points is not small beside delta={delta:g}")
    return Domain.create_aligned(-extent, extent, spacing)


@np.errstate(all="ignore")
def bounds(history: History, delta: float) -> tuple[float, float, float]:
    """(lower bound, estimate, upper bound) of ε; raises where the grid cannot be used."""
    delta_error = delta / 1000
    steps_of = merged(history)
    domain = _grid(history, delta, delta_error)
    each = (PoissonSubsampledGaussianPRV(q, sigma) for sigma, q in steps_of)
    losses = [discretize(TruncatedPrivacyRandomVariable(one, domain.t_min, domain.t_max), domain) for one in each]
    total = compose_heterogeneous(losses, list(steps_of.values()))
    low, estimate, high = total.compute_epsilon(delta, delta_error, EPSILON_ERROR)
    return float(low), float(estimate), float(high)


def epsilon(history: History, delta: float) -> float:
    """The PRV upper bound of ε, for a history that releases something and has noise in every row."""
    return bounds(history, delta)[2]
