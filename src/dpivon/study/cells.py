"""Rows of the table put together by cell: mean and spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dpivon.study.table import Row

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
        self._by: dict[Key, list[Row]] = {}
        for row in rows:
            key = (row["method"], row["batch_size"], row["noise_multiplier"], row["max_grad_norm"])
            self._by.setdefault(key, []).append(row)

    def __contains__(self, key: Key) -> bool:
        return key in self._by

    def get(self, method: str, b: int, sigma: float, c: float, column: str) -> Value | None:
        return value(row[column] for row in self._by.get((method, b, sigma, c), []))

    def axis(self, column: str) -> list[Any]:
        """Every value that a setting takes, in order."""
        return sorted({row[column] for row in self.rows})

    @property
    def methods(self) -> list[str]:
        return self.axis("method")

    @property
    def keys(self) -> list[Key]:
        return sorted(self._by)
