"""Which part of a logical batch comes next: a batch that does not fit in memory is summed in micro-batches, and released once.

Two tell us how a batch is split. Ours (:class:`dpivon.BatchMemoryManager`) announces every micro-batch when it hands it out.
Opacus's queues a flag for every step to come. If nobody says anything, every step is a whole batch.
"""

from __future__ import annotations

from dpivon.errors import PrivacyError
from dpivon.privacy.mechanism import NoiseSpec


class LogicalBatch:
    """The batch under way: what it is clipped to, whether it goes on, and that no part of it is summed twice."""

    def __init__(self) -> None:
        self.spec: NoiseSpec | None = None  # from its first sum until its release
        self.goes_on = False  # whether the last step was a part of it, but not its end
        self.flags: list[bool] = []  # Opacus's: whether each of the next steps is followed by another part
        self.is_last: bool | None = None  # ours: whether the micro-batch at hand is the last; None: none was announced
        self.is_summed = False  # and whether it is in the sum already

    def announce(self, *, last: bool) -> None:
        """A micro-batch is handed out."""
        self.is_last, self.is_summed = last, False

    def check(self, spec: NoiseSpec, *, drawn: bool) -> None:
        """Before a part is summed: with the bound of the others, and for the first time. ``drawn``: by our sampler."""
        if self.spec is not None and self.spec != spec:
            raise PrivacyError(
                "noise_multiplier or max_grad_norm changed in the middle of a logical batch: part of the sum was clipped to "
                "another bound. Step schedulers between logical batches."
            )
        self.check_new(drawn=drawn)

    def check_new(self, *, drawn: bool) -> None:
        """Without an announcement only a batch that goes on, and of which no flag is left, is known to be repeated."""
        repeated = self.is_summed if self.is_last is not None else drawn and self.goes_on and not self.flags
        if repeated:
            raise PrivacyError(
                "step() twice on one micro-batch: its examples would be clipped twice in one release. Take the next "
                "micro-batch from the BatchMemoryManager before every step()."
            )

    def more_follow(self, *, take: bool = True) -> bool:
        """Whether the part that was summed is not the last. ``take`` uses up Opacus's flag."""
        if self.is_last is not None:
            return not self.is_last
        if not self.flags:
            return False
        return self.flags.pop(0) if take else self.flags[0]

    def end(self) -> None:
        """It was released."""
        self.spec, self.goes_on = None, False

    def abandon(self) -> bool:
        """It will not be completed. Returns whether anything of it may be in the sum, also after a release that failed."""
        begun = self.goes_on or self.spec is not None
        self.is_last, self.goes_on = None, False
        self.flags.clear()
        return begun
