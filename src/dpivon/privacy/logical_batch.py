"""A logical batch: its micro-batches, the passes over it, and its clipped sum until that is released, once.

A batch that does not fit in memory is split: ours (:class:`BatchMemoryManager`) announces every micro-batch when it
hands it out; Opacus's queues a flag for every step to come. Without either, every step is a whole batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler

from dpivon.errors import ArgumentError, PrivacyError, bad, check_whole
from dpivon.optim.ivon import IVON
from dpivon.optim.tensors import TensorList
from dpivon.privacy.forward_watch import ForwardWatch
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.mechanism import NoiseSpec
from dpivon.privacy.people import end_of_part
from dpivon.release import LearnsFromReleases, Release
from dpivon.shards import like_parameter, local

if TYPE_CHECKING:
    from dpivon.privacy.optimizer import DPOptimizer


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


def variational(inner: Optimizer) -> IVON:
    """The optimizer, if it has a posterior to sample from."""
    if not isinstance(inner, IVON):
        name = type(inner).__name__
        raise ArgumentError(f"optimizer={name}: has no posterior to sample from. Make it private with dpivon.IVON.")
    return inner


class ThetaPasses:
    """Passes over one batch, each at a θ-sample of an inner :class:`dpivon.IVON`: averaged per example before clipping.

    Keeps what the passes of a step leave at ``source`` in step with the samples. Other optimizers make one pass.
    """

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
            self._source.between_samples()
        try:
            with inner.sampled_params(train=True):
                yield
            if k > 1:
                self._check_same_batch(first=inner.samples_used == 1)
        except BaseException:
            self.forget(inner)
            raise
        self._source.between_samples()

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
            self._source.between_samples()
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


# The clipped sum is where Opacus keeps it, in ``p.summed_grad``; the release takes its place.


def drop_sums(inner: Optimizer) -> None:
    """Nothing is summed, also of a parameter that was frozen since: thawed, it would bring its part into another release."""
    for p in _all_parameters(inner):
        p.summed_grad = None


def add_sums(params: Sequence[Any], sums: Sequence[Tensor]) -> None:
    """All or nothing: after an error half-way, a retry would count the batch twice in some of the parameters."""
    held = _unreleased(params)
    if any(h is None for h in held):
        new = [s if h is None else h + s for h, s in zip(held, sums, strict=True)]
    else:
        new = (TensorList(held) + TensorList(sums)).tensors
    for p, total in zip(params, new, strict=True):
        p.summed_grad = total


def unreleased_sums(params: Sequence[Any]) -> dict[Tensor, Any]:
    """The sum by parameter; an error if it was released before."""
    return dict(zip(params, _unreleased(params), strict=True))


def _unreleased(params: Sequence[Any]) -> list[Any]:
    held = [p.summed_grad for p in params]
    _check_processed_flag([total for total in held if total is not None])
    return held


def hand_over(release: Release, params: Sequence[Any], inner: Optimizer, *, by_program: bool = False) -> None:
    """The sum is spent, and ``p.grad`` is g_dp: raw gradients and sums are gone, also of a parameter that was frozen since.

    ``by_program``: there was no sum. An optimizer that reads ``p.grad`` may write to it too, and gets a copy.
    """
    spent = [p.summed_grad for p in params]
    for p in _all_parameters(inner):
        p.grad = None
        if not by_program:
            p.summed_grad = None
    given = _in_order(release.gradients, params)
    if not isinstance(inner, LearnsFromReleases):
        given = list(torch._foreach_mul(given, 1.0))
    if not by_program:  # which makes gradients of whole parameters in fp32
        _mark_as_processed(spent)
        for p, total in zip(params, spent, strict=True):
            p.summed_grad = total
        given = [
            g if type(p) is Parameter and g.dtype is p.dtype and g.shape == p.shape else _laid_out(g, p)
            for p, g in zip(params, given, strict=True)
        ]
    for p, g in zip(params, given, strict=True):
        p.grad = g


def _in_order(gradients: Mapping[Tensor, Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """Those of these parameters. They mostly come in this order, and to look one up is a call or two for each."""
    if len(gradients) == len(params) and all(map(is_, gradients, params)):
        return list(gradients.values())
    return [gradients[p] for p in params]


def _laid_out(g: Tensor, p: Tensor) -> Tensor:
    own = local(p)
    return like_parameter((g if g.shape == own.shape else g.view_as(own)).to(p.dtype), p)


def _all_parameters(inner: Optimizer) -> list[Any]:
    return [p for group in inner.param_groups for p in group["params"]]


class BatchMemoryManager:
    """Splits every logical batch into micro-batches of at most ``max_physical_batch_size`` rows.

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

    With ``user_ids`` a person is never split: one who has more rows than that is a micro-batch alone (``rows_per_user``
    bounds it).

    Args:
        data_loader: the loader that ``make_private`` returned.
        max_physical_batch_size: how many rows fit in memory at once.
        optimizer: the optimizer that ``make_private`` returned.
    """

    def __init__(self, *, data_loader: DataLoader[Any], max_physical_batch_size: int, optimizer: DPOptimizer) -> None:
        self.data_loader, self.optimizer = data_loader, optimizer
        name, fix = "max_physical_batch_size", "Use what fits in memory, such as 64"
        self.max_physical_batch_size = check_whole(name, max_physical_batch_size, fix, at_least=1)

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
            problem = "batches were fetched ahead, or none was handed out yet"
            fix = "Call retry() inside the loop over micro-batches, with num_workers=0"
            raise bad("num_workers", self._source.num_workers, problem, fix)
        if self.optimizer.together.sharded:
            raise PrivacyError(
                "retry() on a sharded model: the other ranks would not run the batch again, and wait for ever. Start again "
                "with a smaller max_physical_batch_size."
            )
        if self.optimizer.draws is not None and not self.optimizer.draws.redeemable:
            raise PrivacyError("retry() after its batch was released: it would be released twice. Go on to the next.")
        if self.size == 1:
            fix = "Use a smaller model or another device"
            raise bad("max_physical_batch_size", 1, "not even one example fits", fix)
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
            first, last, sizes = split.flags.popleft()
            self.optimizer.begin_micro_batch(first=first, last=last)
            if self.optimizer.draws is not None:
                self.optimizer.draws.sizes, self.optimizer.draws.batch = sizes, batch if sizes is not None else None
            yield batch
        self.optimizer.abandon_virtual_batch()

    def __len__(self) -> int:
        """How many micro-batches to expect in a pass."""
        logical = self.optimizer.expected_batch_size
        return math.ceil(len(self._source) * max(1.0, logical / self.size))


class _Split(Sampler[list[int]]):
    """Chunks of each logical batch, with (first, last, rows of each person) noted in the order in which they will be yielded.

    ``even``: as many on every rank, if need be empty ones. The layers of a sharded model are gathered in every forward, so
    all ranks must run as many.
    """

    def __init__(self, sampler: Sampler[list[int]], size: int, even: bool) -> None:
        self.sampler, self.size, self.even = sampler, size, even
        self.flags: deque[tuple[bool, bool, tuple[int, ...] | None]] = deque()
        self.again = False

    def __iter__(self) -> Iterator[list[int]]:
        self.flags.clear()
        by_person = getattr(self.sampler, "people", None) is not None
        for indices in self.sampler:
            sizes: tuple[int, ...] | None = self.sampler.sizes.popleft() if by_person else None  # type: ignore[attr-defined]
            start, last = 0, False
            while not last:
                part, end, last = self._part(indices, sizes, start)
                self.flags.append((start == 0, last, None if sizes is None else sizes[start:end]))
                yield part
                start = end
                if self.again:
                    start, last, self.again = 0, False, False

    def _part(self, indices: list[int], sizes: tuple[int, ...] | None, start: int) -> tuple[list[int], int, bool]:
        """The rows of the part that begins with an example or person, where it ends, and whether it is the last."""
        if sizes is None:
            end = start + self.size
            return indices[start:end], end, end >= max(len(indices), self._largest())
        if self.even:
            raise PrivacyError(
                "BatchMemoryManager on a sharded model with user_ids: ranks do not know how many micro-batches the others "
                "have. Use a batch that fits."
            )
        end, before = end_of_part(sizes, start, self.size), sum(sizes[:start])
        return indices[before : before + sum(sizes[start:end])], end, end >= len(sizes)

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
