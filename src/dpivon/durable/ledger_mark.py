"""What a checkpoint notes of its ledger, so that a run never goes on with an account that holds less than was spent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpivon.durable.ledger import Record
from dpivon.errors import PrivacyError


def mark(record: Record) -> dict[str, Any]:
    """Which ledger it is, and how many releases of each kind are in it."""
    return {"id": record.id, "counts": record.counts()}


def check_mark(path: Path, record: Record, noted: Mapping[str, Any]) -> None:
    """Refuse a ledger that is not the one that was noted, or that holds less."""
    if noted["id"] != record.id:
        raise PrivacyError(f"{path}: is not the ledger of this run's checkpoints. Put back the right one.")
    counts = record.counts()
    for terms, n in noted["counts"].items():
        if counts.get(terms, 0) < n:
            raise PrivacyError(
                f"{path}: holds {counts.get(terms, 0)} releases of a kind of which the checkpoint knows {n}: it was cut "
                "short or replaced by an older copy. Put back the newest."
            )
