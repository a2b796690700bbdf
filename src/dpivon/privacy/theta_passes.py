"""Passes over one batch, each at a θ-sample of its own: averaged per example before clipping, so that they are one release.

They are of an inner :class:`dpivon.IVON`. An optimizer that samples nothing makes one pass, of which there is little to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

from dpivon.errors import ArgumentError, PrivacyError
from dpivon.optim.ivon import IVON
from dpivon.privacy.forward_watch import ForwardWatch
from dpivon.privacy.gradients.bookkeeping import BookKeeper


def variational(inner: Optimizer) -> IVON:
    """The optimizer, if it has a posterior to sample from."""
    if not isinstance(inner, IVON):
        name = type(inner).__name__
        raise ArgumentError(f"optimizer={name}: has no posterior to sample from. Make it private with dpivon.IVON.")
    return inner


class ThetaPasses:
    """Keeps what the passes of a step leave at ``source`` in step with the θ-samples of the inner optimizer."""

    def __init__(self, source: BookKeeper, watch: ForwardWatch) -> None:
        self._source, self._watch = source, watch
        self._first_batch: list[Tensor] = []

    @contextmanager
    def sample(self, inner: IVON) -> Iterator[None]:
        """A training sample: inside, the parameters are θ, and a pass is made at it. If that fails it is as if it never was."""
        k = inner.mc_samples
        if inner.samples_used >= k and not inner.inside_training_sample:
            raise PrivacyError(
                f"sampled_params(train=True) entered {inner.samples_used + 1} times in one step but mc_samples={k}: each "
                "further pass would be clipped again. Make the optimizer with mc_samples set to the number of passes, and "
                "call step() after them."
            )
        if k > 1:
            self._source.begin_sample()
        try:
            with inner.sampled_params(train=True):
                yield
            if k > 1:
                self._check_same_batch(first=inner.samples_used == 1)
        except BaseException:
            self.forget(inner)
            raise
        self._source.end_of_sample()

    def _check_same_batch(self, *, first: bool) -> None:
        if first:
            self._first_batch = self._watch.batch
        elif not self._watch.same_batch(self._first_batch):
            raise PrivacyError(
                "The θ-samples of one step saw different batches: an example in two of them would be clipped twice. Use one "
                "batch for all of a step's samples; for augmentations pass augmentations=M to make_private."
            )

    def check_complete(self, inner: Optimizer) -> None:
        """At a step: as many passes as there are samples, or none of them sampled."""
        if isinstance(inner, IVON) and 0 < inner.samples_used < inner.mc_samples:
            used, k = inner.samples_used, inner.mc_samples
            raise PrivacyError(
                f"step() after {used} of mc_samples={k} passes: enter sampled_params(train=True) {k} times before step()."
            )

    def rewind(self, inner: Optimizer) -> None:
        """The next micro-batch of the same logical batch uses the same θ."""
        if isinstance(inner, IVON):
            inner.rewind_samples()

    def clear(self, inner: Optimizer, *, keep_theta: bool) -> None:
        """Forget pending gradients, but for those of a step of which more samples are to come; and θ, unless it is kept."""
        if isinstance(inner, IVON) and inner.samples_complete:
            self._source.begin_sample()
            return
        self._source.clear()
        if isinstance(inner, IVON) and not inner.inside_training_sample and not keep_theta:
            inner.discard_samples()

    def forget(self, inner: Optimizer) -> None:
        """Passes that were not finished, and samples that were used in vain: whoever tries again begins with the first."""
        self._source.forget_passes()
        if isinstance(inner, IVON) and inner.samples_used:
            self._source.clear()
            inner.rewind_samples()
