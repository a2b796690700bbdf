"""What (ε, δ) means for one person, in numbers; the statement of a run, and whether its ledger bears it out."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from dpivon.errors import DpivonError
from dpivon.privacy.accounting import ACCOUNTANTS
from dpivon.privacy.accounting.recorded import epsilons, history
from dpivon.report.page import Section
from dpivon.report.run_folder import RunFolder

_SLACK = 1e-6  # relative: accountants on two machines differ in the last digits


def factor(epsilon: float) -> float:
    """e^ε: by how much an outcome's probability may differ with and without one record."""
    return math.exp(epsilon) if epsilon < 700 else math.inf


def best_guess(epsilon: float, delta: float) -> float:
    """The largest share of right guesses whether a record was used, at even odds, (e^ε + δ)/(e^ε + 1).

    Half of one minus the least sum of both error rates, 2(1 − δ)/(1 + e^ε): Kairouz, Oh and Viswanath, 2015, theorem 2.1.
    """
    return 1 - (1 - delta) / (1 + factor(epsilon))


def most_detected(epsilon: float, delta: float, false_alarms: float) -> float:
    """The largest share of used records that a test finds which is wrong about so many unused ones (ibid.)."""
    grown = min(1.0, factor(epsilon) * false_alarms + delta)
    return max(false_alarms, min(grown, 1 - max(0.0, 1 - delta - false_alarms) / factor(epsilon)))


def believed(epsilon: float, prior: float) -> float:
    """What a belief of ``prior`` becomes at most, outside the exception of probability δ: Bayes with odds times e^ε."""
    odds = prior / (1 - prior) * factor(epsilon)
    return odds / (1 + odds) if math.isfinite(odds) else 1.0


def percent(share: float) -> str:
    """Rounded upwards, since these are bounds, with as many digits as it takes not to say 100 % of less."""
    if share >= 1:
        return "100\u00a0%"
    for digits in range(1, 10):
        up = math.ceil(share * 100 * 10**digits - 1e-6) / 10**digits
        if up < 100:
            return f"{up:.{digits}f}\u00a0%"
    return "nearly 100\u00a0%"


@dataclass(frozen=True)
class Reading:
    """The statement's numbers at one (ε, δ)."""

    epsilon: float
    delta: float

    @property
    def private(self) -> bool:
        return math.isfinite(self.epsilon)

    @property
    def shown(self) -> str:
        return shown(self.epsilon)

    @property
    def factor(self) -> str:
        value = _up(factor(self.epsilon), 4)
        return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}" if value < 1e9 else f"{value:.3e}"

    @property
    def guess(self) -> str:
        return percent(best_guess(self.epsilon, self.delta))

    @property
    def from_one_percent(self) -> str:
        return percent(believed(self.epsilon, 0.01))

    @property
    def detected(self) -> str:
        return percent(most_detected(self.epsilon, self.delta, 0.01))

    @property
    def delta_in_words(self) -> str:
        if self.delta <= 0:
            return "never"
        return f"one in {round(1 / self.delta):,}" if self.delta > 1e-15 else "practically never"

    @property
    def two_rows(self) -> str:
        """A person with two rows, by group privacy: from one to the other in two steps, δ + e^ε δ."""
        delta = _up((1 + factor(self.epsilon)) * self.delta, 2)
        return f"ε = {shown(2 * self.epsilon)}, δ = {min(1.0, delta):.2g}"


def shown(epsilon: float) -> str:
    """ε to three digits, rounded up: a bound must not be rounded down."""
    if not math.isfinite(epsilon):
        return "∞"
    value = _up(epsilon, 3)
    return "0" if value == 0 else f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _up(value: float, digits: int) -> float:
    """The next larger number of so many digits."""
    if value <= 0 or not math.isfinite(value):
        return value
    unit = digits - 1 - math.floor(math.log10(value))
    scaled = value * 10.0**unit
    return math.ceil(scaled - 1e-9 * scaled) / 10.0**unit


# ---- of a run


@dataclass(frozen=True)
class Checked:
    """ε as it is reported: by each accountant the summary's, or the ledger's where that is larger; the least of them holds."""

    epsilon: float
    by: str
    by_accountant: dict[str, float]
    problems: tuple[str, ...]
    releases: int | None = None

    @property
    def holds(self) -> bool:
        return not self.problems


def check(run: RunFolder) -> Checked:
    """Hold the summary against the ledger. Who reads the report reads the larger ε of the two."""
    summary, stated = run.summary, dict(run.summary.epsilon_by_accountant)
    stated.setdefault(summary.accountant, summary.epsilon)
    if run.ledger is None:
        return Checked(max(summary.epsilon, stated[summary.accountant]), summary.accountant, stated, ())
    problems = []
    if summary.ledger_digest and run.ledger.digest != summary.ledger_digest:
        problems.append(
            "The ledger in this folder is not the one that the summary was written from: their digests differ."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # an accountant that falls back to RDP gives an upper bound too
            counted = epsilons(history(run.ledger.record, 0), summary.delta)
    except (DpivonError, IndexError) as error:
        problems.append(f"No ε can be computed from the ledger: {error}")
        return Checked(math.inf, summary.accountant, stated, tuple(problems))
    larger = {name: max(value, stated.get(name, 0.0)) for name, value in counted.items()}
    for name, value in counted.items():
        if value > stated.get(name, math.inf) * (1 + _SLACK):
            problems.append(
                f"By {name.upper()} the ledger's releases cost ε = {shown(value)}, more than the {shown(stated[name])} of the "
                "summary. The ledger's is reported here."
            )
    least = min(larger, key=lambda name: larger[name])  # of those that the ledger bears out
    return Checked(larger[least], least, stated | larger, tuple(problems), run.ledger.record.releases)


def _title(accountant: str) -> str:
    return ACCOUNTANTS[accountant].title if accountant in ACCOUNTANTS else accountant


def section(run: RunFolder, checked: Checked) -> Section:
    summary = run.summary
    accountants = [
        (_title(name), Reading(value, summary.delta), name == checked.by, name == summary.accountant)
        for name, value in sorted(checked.by_accountant.items(), key=lambda item: item[1])
    ]
    return Section(
        "privacy",
        "What the model can reveal about one person",
        "privacy.html",
        {
            "reading": Reading(checked.epsilon, summary.delta),
            "summary": summary,
            "accountant": _title(checked.by),
            "accountants": accountants,
            "checked": checked,
            "has_ledger": run.ledger is not None,
            "has_test": run.test is not None or bool(summary.metrics),
            "has_heldout": any(e.heldout_nll is not None or e.heldout_accuracy is not None for e in run.progress),
        },
    )
