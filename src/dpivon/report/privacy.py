"""The privacy statement of a run, and whether its ledger bears it out."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from dpivon.errors import DpivonError
from dpivon.privacy.accounting import ACCOUNTANTS
from dpivon.privacy.accounting.recorded import epsilons, history
from dpivon.report.page import Section
from dpivon.report.run_folder import LedgerFile, RunFolder
from dpivon.report.statement import Reading, shown

_SLACK = 1e-6  # relative: accountants on two machines differ in the last digits


@dataclass(frozen=True)
class Checked:
    """ε as it is reported: the summary's, or the ledger's where that is larger."""

    epsilon: float
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
        return Checked(max(summary.epsilon, stated[summary.accountant]), stated, ())
    problems = []
    if summary.ledger_digest and run.ledger.digest != summary.ledger_digest:
        problems.append(
            "The ledger in this folder is not the one that the summary was written from: their digests differ."
        )
    try:
        counted = _counted(run.ledger, summary.delta)
    except (DpivonError, IndexError) as error:
        return Checked(math.inf, stated, (*problems, f"No ε can be computed from the ledger: {error}"))
    larger = {name: max(value, stated.get(name, 0.0)) for name, value in counted.items()}
    for name, value in counted.items():
        if value > stated.get(name, math.inf) * (1 + _SLACK):
            problems.append(
                f"By {name.upper()} the ledger's releases cost ε = {shown(value)}, more than the {shown(stated[name])} of the "
                "summary. The ledger's is reported here."
            )
    together = stated | larger
    epsilon = max(summary.epsilon, together.get(summary.accountant, summary.epsilon))
    return Checked(epsilon, together, tuple(problems), run.ledger.record.releases)


def _counted(ledger: LedgerFile, delta: float) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # where an accountant falls back to RDP's bound, that is an upper bound
        return epsilons(history(ledger.record, 0), delta)


def _title(accountant: str) -> str:
    return ACCOUNTANTS[accountant].title if accountant in ACCOUNTANTS else accountant


def section(run: RunFolder, checked: Checked) -> Section:
    summary = run.summary
    accountants = [
        (_title(name), Reading(value, summary.delta), name == summary.accountant)
        for name, value in sorted(checked.by_accountant.items(), key=lambda item: item[1])
    ]
    return Section(
        "privacy",
        "What the model can reveal about one person",
        "privacy.html",
        {
            "reading": Reading(checked.epsilon, summary.delta),
            "summary": summary,
            "accountant": _title(summary.accountant),
            "accountants": accountants,
            "checked": checked,
            "has_ledger": run.ledger is not None,
            "has_test": run.test is not None or bool(summary.metrics),
            "has_heldout": any(e.heldout_nll is not None or e.heldout_accuracy is not None for e in run.progress),
        },
    )
