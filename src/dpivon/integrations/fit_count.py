"""How often an estimator and its clones were fitted: every fit spends ε on the data anew."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from sklearn.base import BaseEstimator

from dpivon.errors import PrivacyWarning


@dataclass
class _Family:
    """An estimator and its clones: how often they were fitted or cloned, which is how often the data was used."""

    fits: int = 0
    clones: int = 0


class CountsFits(BaseEstimator):  # type: ignore[misc]
    """Counts fits over clones, and warns from the second on."""

    epsilon: float | None

    def _family(self) -> _Family:
        return self.__dict__.setdefault("_relatives", _Family())

    def __sklearn_clone__(self) -> Any:
        new = BaseEstimator.__sklearn_clone__(self)
        self._family().clones += 1
        new._relatives = self._family()
        return new

    def _note_fit(self) -> None:
        family = self._family()
        family.fits += 1
        times = max(family.fits, family.clones)
        if times > 1:
            warnings.warn(
                f"epsilon={self.epsilon!r}: is the cost of one fit, and this estimator and its clones are at fit {times}. "
                f"Together they spend up to ε = {times} × {self.epsilon!r} and {times} × δ on data they share, and scores on "
                "held-out rows of it are not covered at all. `dpivon budget --tuning` gives the cost of choosing the best; "
                "choose on public data where you can.",
                PrivacyWarning,
                stacklevel=4,
            )
