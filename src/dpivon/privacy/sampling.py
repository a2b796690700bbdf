"""Poisson sampling: every example, or every person, enters every batch independently with probability q = b/N.

Privacy amplification by subsampling is accounted for exactly this sampler, one fresh draw a release. Both halves are
kept by construction: the loader draws so, and :class:`Draws` counts that no draw is released twice.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from opacus.data_loader import DPDataLoader
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data._utils.collate import default_collate
from torch.utils.data.distributed import DistributedSampler

from dpivon.durable.tensors import bytes_of
from dpivon.errors import PrivacyError, bad, check_number, check_whole
from dpivon.privacy.gradients.model_io import ignored_in
from dpivon.privacy.noise import (
    CRYPTOGRAPHIC,
    OS_ENTROPY,
    SEEDED,
    OneGenerator,
    expanded,
    not_pickled,
    own_generator,
    renewed,
    secure_uniform,
    this_process,
)
from dpivon.privacy.people import People


@dataclass
class Draws:
    """Whether the batch last handed out may still be released, and whom to tell that a new one comes.

    A batch is released at most once, and never after the next one was handed out: credit for a skipped batch must not pay
    for a second release of another.
    """

    redeemable: bool = False
    redeemed: int = 0  # in this pass
    found_ignored: list[Tensor] = field(default_factory=list)  # of the batch last handed out (:func:`ignored_in`)
    sizes: tuple[int, ...] | None = None  # and how many rows each of its people has; None if rows are examples
    batch: Any = None  # and itself, where people are drawn
    listeners: list[weakref.ref[Any]] = field(default_factory=list)
    sampler: Callable[[], PoissonSampler | None] = lambda: None  # who draws
    drawn_in: tuple[int, int] = field(default_factory=this_process)

    def __deepcopy__(self, memo: dict[int, Any]) -> Draws:
        return self  # a copied optimizer still shares the one stream of batches

    def __reduce__(self) -> NoReturn:
        raise not_pickled("sampler")

    @property
    def ignored(self) -> bool:
        """Whether the batch last handed out has labels of -100."""
        return any(map(bool, self.found_ignored))

    def begin_pass(self) -> None:
        self.redeemed = 0
        self._tell("abandon_virtual_batch")

    def draw(self) -> None:
        self.redeemable, self.drawn_in = True, this_process()
        self._tell("next_batch_drawn")

    def deliver(self, sizes: tuple[int, ...] | None = None, batch: Any = None) -> None:
        self.redeemable, self.sizes, self.batch = True, sizes, batch
        self._tell("next_batch_delivered")

    def redeem(self) -> None:
        """The batch last handed out is about to be released."""
        if not self.redeemable:
            raise PrivacyError(
                "step() twice on one Poisson batch: the second release would be charged as if its batch had been sampled "
                "afresh. Take the next batch from the data loader that make_private returned before every step(), and let "
                "accelerate prepare the model and the optimizer only: its loaders draw a batch ahead."
            )
        if self.drawn_in != this_process():
            raise PrivacyError(
                "step() in a forked process on a batch that was drawn before the fork: the parent may release the same batch. "
                "Take the next batch from the data loader in this process."
            )
        self.redeemable, self.sizes, self.batch = False, None, None
        self.redeemed += 1

    def _tell(self, event: str) -> None:
        for ref in self.listeners:
            listener = ref()
            if listener is not None:
                getattr(listener, event)()


class PoissonSampler(OneGenerator, UniformWithReplacementSampler):  # type: ignore[misc]
    """Index batches of size Binomial(n, q); ``steps`` of them make a pass.

    With ``part=(r, W)`` every one of W ranks draws the same batch of all examples, and rank r gets of it those whose index
    leaves r when divided by W. So an example is in a batch with probability q whatever the others do, on one rank only, and
    the same whatever their number: the union over ranks is what one process would draw. Its presence does not move
    another example to another rank, whose sum stays as it is to the bit. In secure mode each rank draws for its own.

    With ``people`` it is people who are drawn, n of them: an index batch has the rows of each, one person's after another's.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        sample_rate: float,
        steps: int,
        generator: torch.Generator | None = None,
        secure: bool = False,
        origin: str = SEEDED,
        part: tuple[int, int] = (0, 1),
        people: People | None = None,
    ) -> None:
        self._process = this_process()
        super().__init__(num_samples=num_samples, sample_rate=sample_rate, generator=generator, steps=steps)
        self.secure, self.origin = secure, CRYPTOGRAPHIC if secure else origin
        self.part, self.people = part, people
        # Rows of each person of the batches of the last pass, till handed out.
        self.sizes: deque[tuple[int, ...]] = deque()
        self.largest_part: int | None = None  # examples of the last draw on the rank that has most; None if unknown
        self.draws = Draws(sampler=weakref.ref(self))

        self.passes, self.position = 0, 0  # where the draws are: in which pass, and how many were made in it
        self.begin_at = 0  # the first draw of the next pass, after a resume in the middle of one
        self.began_at = 0  # that of the pass under way
        # For checkpoints: runs before every draw, and says what the draw is bound to besides the generator's state.
        self.before_draw: Callable[[], bytes] = bytes

    def __reduce__(self) -> NoReturn:
        raise not_pickled("sampler")

    def __iter__(self) -> Iterator[list[int]]:
        self.draws.begin_pass()
        if self.position:  # the last pass was broken off
            self.passes, self.position = self.passes + 1, 0
        self.began_at, self.begin_at = self.begin_at, 0
        sizes = self.sizes = deque()  # of this pass: two that overlap must not take each other's
        for position in range(self.began_at, self.steps):
            self.position = position
            uniform = self._uniform(self.before_draw())
            drawn = members(self.num_samples, self.sample_rate, uniform)
            units = self._of_rank(drawn)
            if self.people is not None:  # chosen on every rank for all, so that their generators stay in step
                chosen = dict(zip(drawn.tolist(), self.people.rows_of(drawn, uniform), strict=True))
                sizes.append(tuple(len(chosen[i]) for i in units))
                units = [row for i in units for row in chosen[i]]
            self.position = position + 1
            self.draws.draw()
            yield units
        self.passes, self.position = self.passes + 1, 0

    def _uniform(self, bound_to: bytes) -> Callable[[int], Tensor]:
        """Draws so many numbers in [0, 1) for one batch, and more if it is called again."""
        if self.secure:
            return secure_uniform
        generator = self.generator
        if bound_to:
            state = bytes_of(generator.get_state())
            torch.rand(1, generator=generator)  # the next draw starts from another state
            generator = expanded(torch.Generator(), state + bound_to)
        return lambda n: torch.rand(n, generator=generator, dtype=torch.float64)

    def _of_rank(self, drawn: Tensor) -> list[int]:
        rank, world = self.part
        owner = drawn % world if world > 1 else None
        largest = len(drawn) if owner is None else int(torch.bincount(owner, minlength=world).max())
        self.largest_part = None if self.secure else largest
        mine: list[int] = (drawn if owner is None else drawn[owner == rank]).tolist()
        return mine

    def refresh(self) -> None:
        """From here on batches that are independent of all before, whatever seed was set."""
        if not self.secure:  # in place: the data loader may draw from the same one
            renewed(self._generator)
            self._origin = OS_ENTROPY


def members(n: int, rate: float, uniform: Callable[[int], Tensor]) -> Tensor:
    """Who of n is drawn, each independently with probability ``rate``; ``uniform(k)`` draws k numbers in [0, 1).

    How many are passed over before the next is drawn has P(at least k) = (1 − q)ᵏ: ⌊log(1 − u)/log(1 − q)⌋. So a batch takes
    about nq numbers in place of n. By NumPy, in this thread: torch wakes a thread per core, and waits for the slowest.
    """
    if rate >= 1.0:
        return torch.arange(n)
    found, last, most = [], -1.0, math.ceil(n * rate + 6.0 * math.sqrt(n * rate)) + 8
    while last < n:
        passed = np.floor(np.log1p(-uniform(most).numpy()) / math.log1p(-rate))
        found.append(last + np.cumsum(passed + 1.0))
        last = float(found[-1][-1])
    drawn = np.concatenate(found)
    return torch.from_numpy(drawn[drawn < n].astype(np.int64))


class PoissonDataLoader(DPDataLoader):  # type: ignore[misc]
    """A ``DataLoader`` that draws Poisson batches, the empty one included."""

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: PoissonSampler,
        collate_fn: Any,
        batch_first: bool,
        **options: Any,
    ):
        self.sample_rate, self.distributed = sampler.sample_rate, False
        self.draws = sampler.draws
        DataLoader.__init__(
            self,
            dataset=dataset,
            batch_sampler=sampler,
            collate_fn=CollateWithEmpty(dataset, collate_fn or default_collate, 0 if batch_first else 1),
            **options,
        )

    def __iter__(self) -> Iterator[Any]:
        begun_in, sampler, sizes = this_process(), self.batch_sampler, None
        for batch in super().__iter__():
            if self.num_workers and this_process() != begun_in:
                raise PrivacyError(
                    "A pass over the data loader that began before a fork goes on after it: its workers hold batches that the "
                    "parent releases too. Begin a new pass in this process."
                )
            self.draws.found_ignored = ignored_in(batch)
            sizes = sampler.sizes if sizes is None else sizes  # of this pass, also if another one has begun since
            self.draws.deliver(*([] if sampler.people is None else [sizes.popleft(), batch]))
            yield batch


class CollateWithEmpty:
    """The user's collate function; an empty batch gets the structure of a real one, with no rows."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any], batch_dim: int) -> None:
        self.dataset, self.collate_fn, self.batch_dim = dataset, collate_fn, batch_dim

    def __call__(self, batch: list[Any]) -> Any:
        if batch:
            return self.collate_fn(batch)
        return self._without_rows(self.collate_fn([self.dataset[0]]))  # its shape, none of its values

    def _without_rows(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.narrow(self.batch_dim if value.dim() > self.batch_dim else 0, 0, 0)
        if isinstance(value, Mapping):
            return {k: self._without_rows(v) for k, v in value.items()}
        if isinstance(value, tuple | list):
            empty = [self._without_rows(v) for v in value]
            return type(value)(*empty) if hasattr(value, "_fields") else type(value)(empty)
        raise bad(
            "data_loader",
            type(value).__name__,
            "an empty Poisson batch cannot be made of this type",
            "Let collate_fn return tensors, or tuples, lists and dicts of them",
        )


@dataclass(frozen=True)
class Sampling:
    """The public constants of a loader: N, b and q = b/N, of people where they are the unit."""

    dataset_size: int
    expected_batch_size: float

    @property
    def sample_rate(self) -> float:
        return self.expected_batch_size / self.dataset_size

    @property
    def steps(self) -> int:
        """Batches in one epoch, ⌈N/b⌉."""
        return math.ceil(self.dataset_size / self.expected_batch_size)


def declare(
    data_loader: DataLoader[Any],
    *,
    dataset_size: int | None,
    expected_batch_size: float | None,
    people: People | None = None,
) -> Sampling:
    """N and b as declared, or as the loader states them; of ``people`` if there are any. Neither is ever read off a batch.

    b is of all ranks together; a loader with a ``DistributedSampler`` states that of one.
    """
    dataset = data_loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        problem = "its dataset has no length, so examples cannot be sampled independently"
        raise bad("data_loader", type(dataset).__name__, problem, "Use a map-style dataset")
    if len(dataset) == 0:
        raise bad("data_loader", "an empty dataset", "there is nothing to train on", "Check the path or the filter")
    n, units = len(dataset), "examples"
    if people is not None:
        people.check(n)
        n, units = len(people), "people"
    if dataset_size is not None:
        n = check_whole("dataset_size", dataset_size, f"Use the public number of training {units}", at_least=1)
    b = expected_batch_size if expected_batch_size is not None else _stated_batch_size(data_loader)
    b = check_number("expected_batch_size", b, "Use the public b = q·N", above=0.0)
    if b > n:
        raise bad("expected_batch_size", b, f"is larger than the dataset ({n} {units})", "Use b ≤ N")
    return Sampling(n, b)


def poisson_loader(
    data_loader: DataLoader[Any],
    sampling: Sampling,
    *,
    batch_first: bool,
    parent: torch.Generator | None,
    secure: bool,
    part: tuple[int, int] = (0, 1),
    people: People | None = None,
) -> PoissonDataLoader:
    """The caller's loader with its batches drawn by Poisson sampling, from its own generator if it has one."""
    _refuse_other_samplers(data_loader, ranks=part[1])
    dataset = data_loader.dataset
    sampler = PoissonSampler(
        num_samples=len(dataset) if people is None else len(people),  # type: ignore[arg-type]
        sample_rate=sampling.sample_rate,
        steps=sampling.steps,
        # Never the global one: reseeding it in the loop would draw the same batches again.
        generator=data_loader.generator or own_generator(parent),
        secure=secure,
        origin=OS_ENTROPY if data_loader.generator is None and parent is None else SEEDED,
        part=part,
        people=people,
    )
    return PoissonDataLoader(
        dataset,
        sampler,
        data_loader.collate_fn,
        batch_first,
        num_workers=data_loader.num_workers,
        pin_memory=data_loader.pin_memory,
        timeout=data_loader.timeout,
        worker_init_fn=data_loader.worker_init_fn,
        multiprocessing_context=data_loader.multiprocessing_context,
        generator=data_loader.generator,
        prefetch_factor=data_loader.prefetch_factor,
        persistent_workers=data_loader.persistent_workers,
    )


def refuse_whole_batches(data_loader: DataLoader[Any], ranks: int) -> None:
    """Batches of the caller's own must be parts of one batch, or every example would be there once a rank."""
    if ranks > 1 and not isinstance(getattr(data_loader.batch_sampler, "sampler", None), DistributedSampler):
        fix = "Give the loader a torch.utils.data.distributed.DistributedSampler"
        raise bad("poisson_sampling", False, f"all {ranks} ranks would take the same whole batch", fix)


def _stated_batch_size(data_loader: DataLoader[Any]) -> float:
    sampler = data_loader.batch_sampler
    if isinstance(sampler, UniformWithReplacementSampler):
        return float(sampler.sample_rate * sampler.num_samples)
    stated = data_loader.batch_size or getattr(sampler, "batch_size", None)
    if stated is None:
        problem = f"the loader's {type(sampler).__name__} states no batch size"
        raise bad("expected_batch_size", None, problem, "Declare expected_batch_size=b")
    own = getattr(sampler, "sampler", None)
    return float(stated) * (own.num_replicas if isinstance(own, DistributedSampler) else 1)


def _refuse_other_samplers(data_loader: DataLoader[Any], ranks: int) -> None:
    """A sampler that means something (weights, a subset) must not be replaced in silence."""
    batch_sampler = data_loader.batch_sampler
    if isinstance(batch_sampler, UniformWithReplacementSampler):
        return
    sampler = getattr(batch_sampler, "sampler", batch_sampler)
    plain = isinstance(sampler, SequentialSampler) or (isinstance(sampler, RandomSampler) and not sampler.replacement)
    if isinstance(sampler, DistributedSampler):
        if sampler.num_replicas != ranks:
            fix = "Remove it: every rank gets its part of each batch anyway"
            raise bad("data_loader", f"num_replicas={sampler.num_replicas}", f"but {ranks} ranks train together", fix)
        plain = True
    if not plain:
        raise bad(
            "data_loader",
            type(sampler).__name__,
            "this sampler would be replaced by Poisson sampling, which accounting assumes",
            "Remove it (take a torch.utils.data.Subset for a subset), or pass poisson_sampling=False and accept ε = inf",
        )
