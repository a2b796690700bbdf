"""Scaling by public bounds: what stands in for StandardScaler, whose mean and deviation are statistics of private rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dpivon.errors import bad

_FIX = "Pass (low, high), numbers or one a feature, known without the data: the range of the instrument, or of the form"


@dataclass(frozen=True)
class Bounds:
    """Each feature clamped to [low, high] and mapped to [−1, 1]: a function of one row and public numbers alone."""

    low: np.ndarray[Any, Any]
    high: np.ndarray[Any, Any]

    @classmethod
    def check(cls, name: str, given: Any, features: int) -> Bounds:
        """``given`` as bounds of so many features, or an error that names the argument."""
        if given is None:
            problem = "the range of the values is private unless you state it, and nothing is read off the data"
            raise bad(name, None, problem, _FIX)
        try:
            low, high = (np.broadcast_to(np.asarray(side, dtype=np.float64), (features,)) for side in given)
        except (TypeError, ValueError):
            raise bad(name, given, f"is no pair (low, high) for {features} feature(s)", _FIX) from None
        if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
            raise bad(name, given, "needs finite low < high", _FIX)
        return cls(low, high)

    def scale(self, values: Any) -> np.ndarray[Any, Any]:
        inside = np.clip(np.asarray(values, dtype=np.float64), self.low, self.high)
        # Halves first: high − low may overflow where neither of them does.
        return (inside / 2 - self.low / 2) / (self.high / 2 - self.low / 2) * 2 - 1

    def unscale(self, values: Any) -> np.ndarray[Any, Any]:
        return self.low + (np.asarray(values, dtype=np.float64) + 1) * (self.high / 2 - self.low / 2)

    @property
    def unit(self) -> np.ndarray[Any, Any]:
        """What a width of 1 on the scaled axis is on the original one."""
        return self.high / 2 - self.low / 2
