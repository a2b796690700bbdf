"""What the optimizer asks of a source of clipped sums, whichever way it computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from dpivon.optim.metric import Factors
from dpivon.privacy.clipping import Clipping


class GradientSource(Protocol):
    """Turns what backward left behind into Σ_i ḡ_i, once."""

    augmentations: int  # consecutive rows of a batch that are one example

    def clipped_sums(
        self, params: Sequence[Tensor], clipping: Clipping, metric: Sequence[Factors] | None = None
    ) -> list[Tensor]:
        """The clipped sum of the pass just made, by parameter. A second call without a new pass is an error.

        With a ``metric``, one D a parameter, it is Σ_i clip(D ⊙ g_i), not divided by D again.
        """
        ...

    def begin_sample(self, params: Sequence[Tensor]) -> None:
        """Another pass over the same examples is about to start."""
        ...

    def end_of_sample(self, params: Sequence[Tensor], samples: int) -> None:
        """One of ``samples`` passes over the same examples is complete: keep its share of their average."""
        ...

    def batches(self, params: Sequence[Tensor]) -> int:
        """How many batches the pending gradients come from."""
        ...

    def clear(self, params: Sequence[Tensor]) -> None:
        """Forget all pending gradients."""
        ...

    def forget_passes(self) -> None:
        """Forget half-finished forward and backward passes, which the next one must not inherit."""
        ...
