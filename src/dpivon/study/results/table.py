"""Results as one tidy table, one row per run; its cells, with mean and spread over seeds; and which code made a row."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dpivon.errors import bad
from dpivon.methods import METHODS
from dpivon.study.plan.plan import shown

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


CELL = ("batch_size", "noise_multiplier", "max_grad_norm")
Key = tuple[str, int, float, float]  # method, b, σ, C


@dataclass(frozen=True)
class Value:
    """Mean, standard deviation over seeds and number of seeds."""

    mean: float
    std: float
    n: int

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.std / math.sqrt(self.n)

    def __str__(self) -> str:
        return f"{self.mean:.3g} ± {self.std:.1g}" if self.n > 1 else f"{self.mean:.3g}"


def value(numbers: Iterable[float | None]) -> Value | None:
    """None without numbers; NaN if any run diverged, since leaving it out would flatter the method."""
    found = [x for x in numbers if x is not None]
    if not found:
        return None
    mean = sum(found) / len(found)
    if len(found) < 2:
        return Value(mean, 0.0, len(found))
    return Value(mean, math.sqrt(sum((x - mean) ** 2 for x in found) / (len(found) - 1)), len(found))


class Cells:
    """The runs of one study by (method, b, σ, C)."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.members: dict[Key, list[Row]] = {}
        for row in rows:
            key: Any = tuple(row[k] for k in ("method", *CELL))
            self.members.setdefault(key, []).append(row)

    def get(self, method: str, b: int, sigma: float, c: float, column: str) -> Value | None:
        return value(row[column] for row in self.members.get((method, b, sigma, c), []))

    def axis(self, column: str) -> list[Any]:
        """Every value that a setting takes, in order."""
        return sorted({row[column] for row in self.rows})

    @property
    def keys(self) -> list[Key]:
        return sorted(self.members)


Variant = tuple[str, str, float | None]  # method, options, learning rate; None where each cell has its own


def variants(rows: Sequence[Row]) -> list[Variant]:
    """Every (method, options, learning rate) of the table, in its order; no rate where each cell has its own."""
    rates: dict[tuple[str, str], dict[tuple[Any, ...], set[float]]] = {}
    for row in rows:
        cell = tuple(row[k] for k in CELL)
        rates.setdefault((row["method"], row["options"]), {}).setdefault(cell, set()).add(row["lr"])
    by_cell = {
        key
        for key, cells in rates.items()
        if len(set().union(*cells.values())) > 1 and all(len(found) == 1 for found in cells.values())
    }
    keys = ((row["method"], row["options"], row["lr"]) for row in rows)
    return list(dict.fromkeys((m, o, None if (m, o) in by_cell else lr) for m, o, lr in keys))


def is_ablation(rows: Sequence[Row]) -> bool:
    """Whether some method stands in several variants, so that its cells must not be averaged together."""
    found = variants(rows)
    return len({method for method, _, _ in found}) < len(found)


def is_of(row: Row, variant: Variant) -> bool:
    """Whether the row is one of the variant's, at whatever rate where each cell has its own."""
    method, options, lr = variant
    return (row["method"], row["options"]) == (method, options) and lr in (None, row["lr"])


def title_of(method: str) -> str:
    """What figures and pages call a method."""
    return METHODS[method].title if method in METHODS else method


def describe(variant: Variant) -> str:
    """A variant in words: its method, what of it was changed, and last its learning rate."""
    method, options, lr = variant
    changed = ", ".join(f"{k} = {shown(v)}" for k, v in json.loads(options).items()) if options else ""
    rate = "a rate for each cell" if lr is None else f"lr {lr:g}"
    return ", ".join(filter(None, (title_of(method), changed, rate)))


COMMIT = "DPIVON_COMMIT"  # names the commit where the code was copied without its history, or into another one
UNKNOWN = "unknown"
_PACKAGE = Path(__file__).parents[2]
#: What a number depends on. Commands, pages and reports are not among it.
_NUMBERS = ("data", "methods", "models", "optim", "privacy", "stacked", "study/run", "variational")
_FILES = ("dropout.py", "metrics.py", "posterior.py", "predict.py", "recipe.py", "release.py", "temperature.py")


@cache
def code() -> str:
    """A digest of every source file that a number depends on; equal where those files are, in whatever commit."""
    found = [p for folder in _NUMBERS for p in (_PACKAGE / folder).rglob("*.py")] + [_PACKAGE / name for name in _FILES]
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@cache
def commit() -> str:
    """What DPIVON_COMMIT names, or the commit of this checkout, with '+changes' where its source files differ from it;
    'unknown' outside a checkout."""
    if named := os.environ.get(COMMIT):
        return named
    found = _git("rev-parse", "--short=10", "HEAD") if _git("ls-files", "_version.py") else ""
    if not found:
        return UNKNOWN
    return f"{found}+changes" if _git("status", "--porcelain", "--", ".") else found


def check_code(rows: Sequence[Row], *, mixed: bool = False) -> str:
    """What a page says of the code of its rows.

    Raises:
        ArgumentError: Rows of different code stand together, and ``mixed`` does not allow it.
    """
    counts = Counter(row.get("code") or row.get("commit") or UNKNOWN for row in rows)
    names = {row.get("code") or row.get("commit") or UNKNOWN: row.get("commit") or UNKNOWN for row in rows}
    listed = ", ".join(f"{names[key]} ({n})" for key, n in sorted(counts.items(), key=lambda item: -item[1]))
    if len(counts) == 1:
        return f"Commit {next(iter(names.values()))}."
    if not mixed:
        fix = "Run them again with one version, or give --mixed-code to compare them all the same, which the page will say"
        raise bad("rows", listed, "were made by different code", fix)
    return f"**Rows of different code are compared here**, by commit (runs): {listed}."


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=_PACKAGE, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
