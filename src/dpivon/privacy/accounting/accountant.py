"""The registry of accountants, ε of a history by one of them, and the account of one training run."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from opacus.accountants import IAccountant

from dpivon.errors import PrivacyError, PrivacyWarning, bad, check_choice, check_number, check_whole
from dpivon.privacy.accounting import rdp
from dpivon.privacy.accounting.history import Entry, History, append, check_entry, check_history, merged
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


NO_NOISE = "noise_multiplier=0"


class Accountant(IAccountant):  # type: ignore[misc]
    """What a training run has released so far, in the form that Opacus's engine expects.

    Every release is a row of ``history``; one without a guarantee is a row with σ = 0, so that the history
    alone already gives ε = ∞ in any accountant. ``unaccounted`` counts these releases by their reason.

    >>> account = Accountant()
    >>> account.step(noise_multiplier=1.0, sample_rate=0.01)
    >>> account.get_epsilon(delta=1e-5)

    Args:
        mechanism: ``"pld"`` (the tightest), ``"prv"`` or ``"rdp"`` (the paper's): how ε is computed from the history.
        orders: Rényi orders of ``"rdp"``: ``"wide"``, ``"opacus"``, or numbers above 1.
    """

    def __init__(self, mechanism: str = DEFAULT, orders: Orders = "wide") -> None:
        self._mechanism = check_accountant(mechanism)
        self._orders = check_orders(orders)
        self.history: History = []
        self.unaccounted: dict[str, int] = {}
        self.unit: str | None = (
            None  # of privacy: empty for an example, or by what people are known; None: not known yet
        )

    def keep_unit(self, unit: str) -> None:
        """Refuse releases of another unit of privacy: what an example costs says nothing of a person."""
        if self.unit not in (None, unit):
            ours, theirs = (name or "the example" for name in (self.unit, unit))
            raise PrivacyError(
                f"The account is for the unit {ours!r}, and a release for {theirs!r} was to be charged to it, so ε would be "
                "that of neither. Use a new PrivacyEngine, and a ledger of its own."
            )
        self.unit = unit

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Charge one release."""
        self.charge(noise_multiplier=noise_multiplier, sample_rate=sample_rate)

    def charge(self, *, noise_multiplier: float, sample_rate: float, steps: int = 1) -> None:
        """Charge ``steps`` releases of noise multiplier σ on Poisson samples of rate q."""
        entry = check_entry(noise_multiplier, sample_rate, steps)
        self._add(entry, NO_NOISE if entry[0] == 0 else None)

    def record_unaccounted(self, reason: str, steps: int = 1) -> None:
        """Charge releases that no accountant covers, such as batches that are no Poisson sample: ε is ∞."""
        if not isinstance(reason, str) or not reason.strip():
            raise bad("reason", reason, "is not a description", "Say in a few words why there is no guarantee")
        self._add(check_entry(0.0, 1.0, steps), reason)

    def _add(self, entry: Entry, unaccounted: str | None) -> None:
        if unaccounted is not None and entry[2]:
            self.unaccounted[unaccounted] = self.unaccounted.get(unaccounted, 0) + entry[2]
        append(self.history, entry)

    def get_epsilon(self, delta: float, *, orders: Orders | None = None) -> float:
        """ε of everything charged so far; ∞, with a :class:`PrivacyWarning`, once one was unaccounted."""
        check_delta(delta)
        reasons = dict(self.unaccounted)
        if not reasons and (silent := sum(row[2] for row in self.history if row[0] == 0)):
            reasons = {NO_NOISE: silent}
        if reasons:
            listed = "; ".join(f"{reason} ({steps} steps)" for reason, steps in reasons.items())
            problem = f"ε is infinite, since some releases have no guarantee: {listed}."
            warnings.warn(problem, PrivacyWarning, stacklevel=2)
            return math.inf
        return epsilon(self.history, delta, self._mechanism, self._orders if orders is None else orders)

    def __len__(self) -> int:
        """The number of releases, not of rows."""
        return sum(row[2] for row in self.history)

    def __bool__(self) -> bool:
        return True  # an empty ledger is still a ledger

    def __repr__(self) -> str:
        return f"Accountant({self._mechanism!r}, releases={len(self)}, unaccounted={self.unaccounted})"

    @property
    def orders(self) -> Orders:
        """The Rényi orders in use."""
        return self._orders

    def mechanism(self) -> str:
        """The accountant's name; no class method as in Opacus, since one class serves every mechanism."""
        return self._mechanism

    def state_dict(self, destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
        """Numbers, strings, lists and tuples only, so that it can be stored without pickle."""
        state: MutableMapping[str, Any] = OrderedDict() if destination is None else destination
        state["history"] = list(self.history)
        state["mechanism"] = self._mechanism
        state["unaccounted"] = dict(self.unaccounted)
        return state

    def excess(self, other: Accountant) -> str:
        """The first kind of release that this account holds more of than the other, in words; empty if there is none."""
        theirs = merged(other.history)
        for (sigma, rate), steps in merged(self.history).items():
            if theirs.get((sigma, rate), 0) < steps:
                return f"{steps} of noise_multiplier={sigma:g} and sample_rate={rate:g}"
        for reason, steps in self.unaccounted.items():
            if other.unaccounted.get(reason, 0) < steps:
                return f"{steps} without a guarantee ({reason})"
        return ""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the account by a saved one that contains it, release by release: ε never falls.

        Raises:
            ArgumentError: the state is not one of an accountant of this mechanism.
            PrivacyError: it lacks a release that this account holds. Either way nothing changes.
        """
        fix = "Give what Accountant.state_dict() returned"
        if not isinstance(state_dict, Mapping) or not state_dict:
            raise bad("state_dict", state_dict, "is not the state of an accountant", fix)
        for key in ("history", "mechanism"):
            if key not in state_dict:
                raise bad("state_dict", sorted(map(str, state_dict)), f"has no key {key!r}", fix)
        if state_dict["mechanism"] != self._mechanism:
            raise bad(
                "mechanism",
                state_dict["mechanism"],
                f"the state is of another accountant than this one, which is {self._mechanism!r}",
                "Load it into an Accountant of the same mechanism",
            )
        counts = state_dict.get("unaccounted", {})
        if not isinstance(counts, Mapping) or not all(isinstance(reason, str) for reason in counts):
            raise bad("unaccounted", counts, "is not a count of steps for each reason", fix)
        history = check_history(state_dict["history"])
        unaccounted = {reason: check_whole("unaccounted", steps, fix) for reason, steps in counts.items()}
        # A history without rows for what it says was unaccounted would lose them in any other accountant.
        without = sum(row[2] for row in history if row[0] == 0)
        if sum(unaccounted.values()) > without:
            raise bad("unaccounted", dict(counts), f"but history has {without} such steps", fix)
        loaded = Accountant(self._mechanism)
        loaded.history, loaded.unaccounted = history, unaccounted
        if held := self.excess(loaded):
            raise PrivacyError(
                f"state_dict: holds fewer releases than the {held} of this account, which cannot be taken back. Load it into a "
                "new Accountant."
            )
        self.history, self.unaccounted = history, unaccounted
