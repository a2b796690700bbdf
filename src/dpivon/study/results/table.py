"""Results as one tidy table: one row per run, rewritten whole so that it is never half a row."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dpivon.errors import bad

SCORES = ("accuracy", "nll", "ece", "brier")
QUANTILES = ("q05", "median", "q95")
COLUMNS = (
    "method", "batch_size", "noise_multiplier", "max_grad_norm", "seed", "lr", "options", "epochs",
    "epsilon", "epsilon_pld", "delta",
    *SCORES, *(f"mc_{s}" for s in SCORES), "mc_samples",
    "temperature", "epsilon_tempered", *(f"tempered_{s}" for s in SCORES),
    "projected_share", *(f"h_{q}" for q in QUANTILES), *(f"std_{q}" for q in QUANTILES),
    "steps", "releases", "train_size", "dataset", "network", "augment", "split",
    "seconds", "stack_size", "stack_methods", "precision", "hardware", "torch", "version", "commit", "code",
    "settings", "defaults", "id",
)  # fmt: skip
COST = ("epsilon", "epsilon_pld", "epsilon_tempered", "releases")  # what a run cost
DIAGNOSTIC_COLUMNS = (
    "id", "step", "epoch", "projected_share", *(f"h_{q}" for q in QUANTILES), *(f"std_{q}" for q in QUANTILES),
)  # fmt: skip
OOD_SCORES = ("confidence", "entropy", "information")
COVERAGES = tuple(range(10, 100, 10))
SELECTIVE = ("aurc", *(f"accuracy_at_{c}" for c in COVERAGES))
ROBUSTNESS_COLUMNS = (
    "id", "predicts", "kind", "condition", "severity", "images", *SCORES,
    *(f"auroc_{s}" for s in OOD_SCORES), *(f"fpr95_{s}" for s in OOD_SCORES), *SELECTIVE,
)  # fmt: skip
_TEXT = {
    "method", "options", "dataset", "network", "augment", "split", "precision", "hardware", "torch", "version", "id",
    "commit", "code", "settings", "defaults", "predicts", "kind", "condition",
    "variant", "chosen", "contender", "number", "scope", "text", "verdict", "numbers",  # of a comparison
}  # fmt: skip
_WHOLE = {
    "batch_size", "seed", "epochs", "mc_samples", "steps", "releases", "train_size", "stack_size", "stack_methods", "step",
    "severity", "images",
}  # fmt: skip

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """Rows with numbers as numbers; an empty cell is None, and a missing file is an empty table."""
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [{k: _value(k, v) for k, v in row.items()} for row in csv.DictReader(file, strict=True)]
    except (OSError, ValueError, TypeError, csv.Error) as error:
        fix = "Restore it from a copy, or delete it and run `dpivon study run` again"
        raise bad("table", str(path), f"is no table of results ({error})", fix) from None


def write(path: Path, rows: Iterable[Mapping[str, Any]], columns: tuple[str, ...] = COLUMNS) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: _text(k, v) for k, v in row.items()})
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def add(path: Path, rows: Iterable[Row], columns: tuple[str, ...] = COLUMNS) -> None:
    """Add rows; those of a run that is there already are replaced, so that no run stands twice."""
    rows = list(rows)
    new = {row["id"] for row in rows}
    write(path, [*(row for row in read(path) if row["id"] not in new), *rows], columns)


def larger(a: Row, b: Row) -> Row:
    """The larger of two costs of a run each; a table from before a column does not know it, and takes nothing away."""
    return {k: max((row[k] for row in (a, b) if row.get(k) is not None), default=None) for k in COST}


def _value(key: str, text: str | None) -> Any:
    if key in _TEXT:
        return text or ""
    if not text:
        return None
    return int(text) if key in _WHOLE else float(text)


def _text(key: str, value: Any) -> Any:
    if value is None:
        return ""
    exact = key.startswith("epsilon") or not isinstance(value, float)  # ε must not be rounded down
    return value if exact else f"{value:.7g}"
