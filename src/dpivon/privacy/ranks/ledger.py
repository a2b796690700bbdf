"""One ledger for all ranks: the first has the file, the others follow what it says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dpivon.durable.ledger import Ledger, Record, Terms
from dpivon.privacy.ranks.group import Group


class FollowedLedger:
    """The record of a ledger that another rank writes. A charge here follows one that is on that rank's disk already."""

    def __init__(self, path: str | os.PathLike[str], record: Record) -> None:
        self.path, self.record = Path(path), record

    def charge(self, terms: Terms, n: int = 1, evidence: str = "") -> None:
        self.record.note(terms, n, evidence)

    def close(self) -> None:
        """Nothing is open here."""


def open_ledger(path: str | os.PathLike[str], group: Group | None) -> Ledger | FollowedLedger:
    """The ledger, where this process keeps it; an error on one rank is one on all."""
    if group is None:
        return Ledger(path)
    ledger = group.by_first(lambda: Ledger(path))
    said = group.tell(None if ledger is None else _plain(ledger.record))
    return ledger if ledger is not None else FollowedLedger(path, _record(said))


def _plain(record: Record) -> dict[str, Any]:
    return {
        "id": record.id,
        "rows": [[list(map(dict, terms)), n] for terms, n in record.rows],
        "evidence": [[at, text] for at, text in record.evidence.items()],
        "releases": record.releases,
    }


def _record(said: dict[str, Any]) -> Record:
    rows = [(tuple(terms), n) for terms, n in said["rows"]]
    return Record(said["id"], rows, dict(said["evidence"]), releases=said["releases"])
