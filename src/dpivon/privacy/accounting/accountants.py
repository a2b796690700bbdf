"""The registry of accountants, and ε of a history by one of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpivon.errors import PrivacyWarning, bad, check_choice, check_number
from dpivon.privacy.accounting import rdp
from dpivon.privacy.accounting.history import History
from dpivon.privacy.accounting.rdp import Orders, check_orders

Bound = Callable[[History, float], float]


class NoBound(Exception):
    """An accountant cannot bound this history numerically; the message says why."""


@dataclass(frozen=True)
class AccountingMethod:
    """One way to compute ε.

    Attributes:
        name: what ``accountant=`` takes.
        title: what reports call it.
        bound: an upper bound of ε for (history, δ); it may raise :class:`NoBound` or a numerical error.
    """

    name: str
    title: str
    bound: Bound


ACCOUNTANTS: dict[str, AccountingMethod] = {}
"""Every accountant by its name."""

DEFAULT = "pld"
"""The tightest one. ``"rdp"`` is the paper's."""


def register_accountant(name: str, title: str, bound: Bound) -> None:
    """Add an accountant, which the engine, the command line and the reports then know by name.

    RDP also holds, so the smaller bound of the two counts, and RDP's wherever ``bound`` fails.
    """
    if name in ACCOUNTANTS:
        raise bad("accountant", name, "is registered already", "Choose another name")
    ACCOUNTANTS[name] = AccountingMethod(name, title, bound)


def check_accountant(accountant: Any) -> str:
    """The name of an accountant whose ε is a guarantee."""
    *others, last = (f'"{name}"' for name in ACCOUNTANTS)
    fix = f"Use {', '.join(others)} or {last}"
    if accountant == "gdp":
        raise bad("accountant", accountant, "the GDP limit under-estimates ε and guarantees nothing", fix)
    return check_choice("accountant", accountant, tuple(ACCOUNTANTS), fix)


def check_delta(delta: Any) -> float:
    """δ strictly between 0 and 1."""
    return check_number("delta", delta, "Give a probability well below 1 / dataset_size", above=0.0, below=1.0)


def epsilon(history: History, delta: float, accountant: str = DEFAULT, orders: Orders = "wide") -> float:
    """An ε such that the whole history is (ε, δ)-differentially private: always an upper bound.

    Args:
        history: rows (noise_multiplier, sample_rate, steps) of the Poisson-subsampled Gaussian mechanism, under adding or
            removing one record.
        delta: δ.
        accountant: ``"pld"``, ``"prv"``, ``"rdp"`` or another that was registered.
        orders: Rényi orders of ``"rdp"``, which also bounds what the others give.
    """
    method, probability, alphas = ACCOUNTANTS[check_accountant(accountant)], check_delta(delta), check_orders(orders)
    if method.name == "rdp":
        return rdp.epsilon(history, probability, alphas)
    rdp_bound = rdp.epsilon(history, probability, alphas)
    if rdp_bound == 0 or math.isinf(rdp_bound):
        return rdp_bound
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            value = method.bound(history, probability)
        reason = "" if math.isfinite(value) else f"it returned {value}"
    except NoBound as refusal:
        reason = str(refusal)
    except (ArithmeticError, ValueError, RuntimeError, MemoryError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        warnings.warn(
            f"The {method.name.upper()} accountant found no bound ({reason}); ε={rdp_bound:.6g} is the RDP bound, "
            'looser but valid: use accountant="rdp" to ask for it directly.',
            PrivacyWarning,
            stacklevel=2,
        )
        return rdp_bound
    return max(0.0, min(value, rdp_bound))
