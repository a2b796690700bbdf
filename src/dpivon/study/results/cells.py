"""Rows of the table by cell, with mean and spread over seeds; and the variants of a method that a table holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dpivon.methods import METHODS
from dpivon.study.plan.plan import shown
from dpivon.study.results.table import Row

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
