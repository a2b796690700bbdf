"""The matrix of bugs × paths: apply each bug, run the audit's own checks, and say which of them sees it."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

from sowing import Mutant

from dpivon.audit.probes import probe
from dpivon.audit.run import CHECKS
from dpivon.audit.session import Check, Finding

METHOD = "dp-ivon-gradsq"


@dataclass(frozen=True)
class Cell:
    mutant: str
    path: str
    verdict: str  # "caught", "missed" or "does not apply"
    by: str
    detail: str
    seconds: float


def in_order(expect: str) -> list[Check]:
    """All checks, the one that should see the bug first."""
    return sorted(CHECKS, key=lambda c: expect not in c.name)


def judge(mutant: Mutant, path: str, checks: list[Check] | None = None) -> Cell:
    """Run checks under the bug until one fails."""
    patch, begun = mutant.paths[path], time.perf_counter()
    if isinstance(patch, str):
        return Cell(mutant.name, path, "does not apply", "", patch, 0.0)
    for check in checks or in_order(mutant.expect):
        finding = under(patch, check, path, mutant.on)
        if finding.holds is False:
            spent = round(time.perf_counter() - begun, 2)
            return Cell(mutant.name, path, "caught", f"{check.tier}: {check.name}", finding.detail, spent)
    return Cell(mutant.name, path, "missed", "", "", round(time.perf_counter() - begun, 2))


def under(patch: object, check: Check, path: str, on: dict[str, Any]) -> Finding:
    subject = probe(path, METHOD, **on)
    with warnings.catch_warnings(), patch():  # type: ignore[operator]
        warnings.simplefilter("ignore")
        return check(subject)
