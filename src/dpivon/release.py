"""What crosses the release boundary: a privatised value and the variance of the noise that is in it.

Code to the left of the boundary (:mod:`dpivon.privacy`) makes a :class:`Release` after charging for it; code to
the right (:mod:`dpivon.optim` and everything after it) sees nothing else, so all it does is post-processing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Release:
    """A released gradient g_dp, by parameter, and the variance of the privacy noise in each coordinate of it.

    It is all that an optimizer learns of the data. Made by the mechanism, after charging for it.

    Attributes:
        gradients: g_dp, by parameter.
        variance: the one actually used for this release, (σC/b)² for a mean over the expected batch b, so that bias
            corrections downstream cannot disagree with the mechanism.
        batch_size: the public b that g_dp is a mean over; None if it is a sum, or if whoever made the release did not say.
    """

    gradients: Mapping[Tensor, Tensor]
    variance: float
    batch_size: float | None = None
