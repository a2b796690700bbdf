"""Large logical batches in bounded memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from torch.utils.data import DataLoader, Sampler

from dpivon.errors import PrivacyError, bad, check_whole
from dpivon.privacy.optimizer import DPOptimizer


class BatchMemoryManager:
    """Splits every logical batch into micro-batches of at most ``max_physical_batch_size`` examples.

    >>> with BatchMemoryManager(data_loader=loader, max_physical_batch_size=64, optimizer=optimizer) as micro_batches:
    ...     for x, y in micro_batches:
    ...         ...  # the ordinary loop; step() releases when the logical batch is complete

    One that does not fit after all is tried again in smaller parts, and charged once:

    >>>         try:
    ...             ...  # the ordinary step
    ...         except torch.OutOfMemoryError:
    ...             micro_batches.retry()  # the same logical batch comes again, in micro-batches of half the size

    Use as Opacus's. Unlike it, each micro-batch carries its own flag, so that an error, a ``continue`` or a ``break``
    never lets the rest of one logical batch run into the next: leaving drops the partial sum.

    Args:
        data_loader: the loader that ``make_private`` returned.
        max_physical_batch_size: how many examples fit in memory at once.
        optimizer: the optimizer that ``make_private`` returned.
    """

    def __init__(self, *, data_loader: DataLoader[Any], max_physical_batch_size: int, optimizer: DPOptimizer) -> None:
        self.data_loader, self.optimizer = data_loader, optimizer
        self.max_physical_batch_size = check_whole(
            "max_physical_batch_size",
            max_physical_batch_size,
            "Use what fits in memory, such as 64",
            at_least=1,
        )

    def __enter__(self) -> MicroBatches:
        self.optimizer.abandon_virtual_batch()
        return MicroBatches(self.data_loader, self.max_physical_batch_size, self.optimizer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.optimizer.abandon_virtual_batch()


class MicroBatches:
    """An iterable of micro-batches that tells the optimizer which of them completes a logical batch."""

    def __init__(self, data_loader: DataLoader[Any], size: int, optimizer: DPOptimizer) -> None:
        self.size, self.optimizer = size, optimizer
        self.dataset = data_loader.dataset
        self._source = data_loader
        self._split: _Split | None = None

    def retry(self) -> None:
        """The logical batch under way failed: drop what is summed of it, and hand it out again in half the size.

        Nothing of it was released, so it is charged once, when it is. ``max_physical_batch_size`` stays halved.
        """
        if self._split is None or self._source.num_workers:
            raise bad(
                "num_workers",
                self._source.num_workers,
                "batches were fetched ahead, or none was handed out yet",
                "Call retry() inside the loop over micro-batches, with num_workers=0",
            )
        if self.optimizer.together.sharded:
            raise PrivacyError(
                "retry() on a sharded model: the other ranks would not run the batch again, and wait for ever. Start again "
                "with a smaller max_physical_batch_size."
            )
        if self.optimizer.draws is not None and not self.optimizer.draws.redeemable:
            raise PrivacyError("retry() after its batch was released: it would be released twice. Go on to the next.")
        if self.size == 1:
            raise bad(
                "max_physical_batch_size", 1, "not even one example fits", "Use a smaller model or another device"
            )
        self.size //= 2
        self.optimizer.abandon_virtual_batch()
        self._split.size, self._split.again = self.size, True

    def __iter__(self) -> Iterator[Any]:
        source = self._source
        even = self.optimizer.together.sharded
        split = self._split = _Split(source.batch_sampler, self.size, even)  # type: ignore[arg-type]
        loader = DataLoader(
            dataset=source.dataset,
            batch_sampler=split,
            num_workers=source.num_workers,
            collate_fn=source.collate_fn,
            pin_memory=source.pin_memory,
            timeout=source.timeout,
            worker_init_fn=source.worker_init_fn,
            multiprocessing_context=source.multiprocessing_context,
            generator=source.generator,
            prefetch_factor=source.prefetch_factor,
            persistent_workers=False,
        )
        for batch in loader:
            first, last = split.flags.popleft()
            self.optimizer.begin_micro_batch(first=first, last=last)
            yield batch
        self.optimizer.abandon_virtual_batch()

    def __len__(self) -> int:
        """How many micro-batches to expect in a pass."""
        logical = self.optimizer.expected_batch_size
        return math.ceil(len(self._source) * max(1.0, logical / self.size))


class _Split(Sampler[list[int]]):
    """Chunks of each logical batch, with (first, last) noted in the order in which they will be yielded.

    ``even``: as many on every rank, if need be empty ones. The layers of a sharded model are gathered in every forward, so
    all ranks must run as many.
    """

    def __init__(self, sampler: Sampler[list[int]], size: int, even: bool) -> None:
        self.sampler, self.size, self.even = sampler, size, even
        self.flags: deque[tuple[bool, bool]] = deque()
        self.again = False

    def __iter__(self) -> Iterator[list[int]]:
        self.flags.clear()
        for indices in self.sampler:
            start, last = 0, False
            while not last:
                last = start + self.size >= max(len(indices), self._largest())
                self.flags.append((start == 0, last))
                yield indices[start : start + self.size]
                start += self.size
                if self.again:
                    start, last, self.again = 0, False, False

    def _largest(self) -> int:
        """The examples of the rank that has most of this logical batch."""
        if not self.even:
            return 0
        largest: int | None = getattr(self.sampler, "largest_part", None)
        if largest is None:
            raise PrivacyError(
                "BatchMemoryManager on a sharded model without a shared draw (secure_mode, or poisson_sampling=False): ranks "
                "do not know how many micro-batches the others have. Use a batch that fits, or the plain mode."
            )
        return largest
