"""From a ledger on disk to ε."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpivon.durable.ledger import Record
from dpivon.errors import DpivonError, PrivacyError
from dpivon.privacy.accounting.accountant import ACCOUNTANTS, Accountant, epsilon
from dpivon.privacy.accounting.history import History, append, check_entry

LEDGER = "ledger.jsonl"


def replay(record: Record, run: int, accountant: Accountant) -> None:
    """Charge an account with all that a ledger holds of one of its runs."""
    for terms, n in record.rows:
        _, _, reason = _row(terms[run])
        if reason is not None:
            accountant.record_unaccounted(reason, n)
        else:
            sigma, rate, _ = _row(terms[run])
            accountant.charge(noise_multiplier=sigma, sample_rate=rate, steps=n)


def history(record: Record, run: int) -> History:
    """Rows (σ, q, steps) of one run; a release without a guarantee is one of σ = 0."""
    rows: History = []
    for terms, n in record.rows:
        sigma, rate, reason = _row(terms[run])
        append(rows, (sigma, rate, n) if reason is None else (0.0, 1.0, n))
    return rows


def drawn(record: Record, run: int) -> dict[str, int]:
    """Releases of one run by where their noise and batches came from."""
    counts: dict[str, int] = {}
    for terms, n in record.rows:
        own = terms[run]
        key = f"noise {own.get('noise', 'unstated')}, batches {own.get('batches', 'unstated')}"
        counts[key] = counts.get(key, 0) + n
    return counts


def seeded(record: Record, run: int) -> int:
    """How many releases of one run can be undone by whoever knows a seed."""
    return sum(n for terms, n in record.rows if str(terms[run].get("noise", "seeded")).startswith("seeded"))


def _row(terms: Mapping[str, Any]) -> tuple[float, float, str | None]:
    try:
        sigma, rate, _ = check_entry(terms["noise_multiplier"], terms["sample_rate"], 0)
        reason = terms["unaccounted"]
        return sigma, rate, None if reason is None else str(reason)
    except (DpivonError, KeyError, TypeError) as error:
        raise PrivacyError(
            f"ledger: holds terms that are none of a release ({error}). It was not written by dpivon."
        ) from None


def epsilons(rows: History, delta: float) -> dict[str, float]:
    """ε by every accountant; each is an upper bound, so the least of them holds."""
    return {name: epsilon(rows, delta, name) for name in ACCOUNTANTS}


def find(run: Path) -> list[Path]:
    """The ledgers of a run: the file itself, or all in a folder and its folders."""
    if run.is_dir():
        return sorted(run.rglob(LEDGER))
    return [run] if run.exists() else []
