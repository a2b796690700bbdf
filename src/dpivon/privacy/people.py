"""Privacy per person: whose row each row of a data set is, which of a drawn person's rows are used, and how they are weighed.

A person is drawn with probability q = b/N, N being the number of people. The gradient of a drawn person is the mean or the sum
over their rows, and it is clipped once. So a person moves the sum by at most C, however many rows they have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpivon.durable.tensors import bytes_of
from dpivon.errors import PrivacyError, bad, check_choice, check_whole
from dpivon.privacy.gradients.model_io import tensors_in
from dpivon.privacy.layers.groups import Groups

GRADIENTS = ("mean", "sum")
PERSON = "person"
_LOOKS = 3  # batches of a loop in which it is looked whether rows are in their order
_FEW = 7  # rows in which an order is seen


@dataclass(frozen=True, eq=False)
class People:
    """The people of a data set.

    Attributes:
        of_row: the number of the person of every row, from 0.
        rows: at most so many rows of a person are used at a time, drawn afresh; None for all.
        gradient: ``"mean"`` or ``"sum"`` over a person's rows. Under the mean every person has the same weight, and C is on
            the scale of one row's gradient; under the sum people with many rows count for more, until they are clipped.
        unit: what a person is called in the ledger, such as the name of a column.
    """

    of_row: Tensor
    rows: int | None = None
    gradient: str = "mean"
    unit: str = PERSON
    counts: Tensor = field(init=False, repr=False)  # rows of every person
    _by_person: Tensor = field(init=False, repr=False)  # the rows, one person's after another's

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", torch.bincount(self.of_row))
        object.__setattr__(self, "_by_person", torch.argsort(self.of_row, stable=True))

    @classmethod
    def of(cls, user_ids: Any, *, rows: int | None = None, gradient: str = "mean", unit: str = PERSON) -> People:
        """Of one id per row: numbers, texts or anything else that can be hashed. Equal ids are one person."""
        ids = user_ids.tolist() if hasattr(user_ids, "tolist") else user_ids
        if isinstance(ids, str) or not isinstance(ids, Iterable):
            raise bad("user_ids", user_ids, "is not one id per row", "Give a list, an array or a tensor of ids")
        if rows is not None:
            rows = check_whole("rows_per_user", rows, "Use None for all rows of a person", at_least=1)
        check_choice("user_gradient", gradient, GRADIENTS, "Say how the rows of a person are put together")
        return cls(torch.tensor(_numbered(ids), dtype=torch.int64), rows, gradient, unit)

    @classmethod
    def given(
        cls,
        user_ids: Any = None,
        rows_per_user: int | None = None,
        user_gradient: str = "mean",
        *,
        poisson_sampling: bool = True,
        **others: Any,
    ) -> People | None:
        """What ``make_private`` was given; None where rows are examples."""
        if user_ids is None:
            if rows_per_user is not None or user_gradient != "mean":
                fix = "Give the id of every row's person, or leave rows_per_user and user_gradient out"
                raise bad("user_ids", None, "but something is said about the rows of a person", fix)
            return None
        if not poisson_sampling:
            fix = "Leave poisson_sampling=True, or train on rows without user_ids"
            raise bad("poisson_sampling", False, "would draw rows, and with user_ids people are drawn", fix)
        return (
            user_ids if isinstance(user_ids, People) else cls.of(user_ids, rows=rows_per_user, gradient=user_gradient)
        )

    def __len__(self) -> int:
        """N, the number of people."""
        return len(self.counts)

    def check(self, rows: int) -> None:
        """Refuse ids of another data set."""
        if len(self.of_row) != rows:
            fix = "Give one id per row, in the order of the data set"
            raise bad("user_ids", f"{len(self.of_row)} ids", f"but the data set has {rows} rows", fix)

    @property
    def terms(self) -> dict[str, Any]:
        """What a run must go on with, besides the ids."""
        return {"unit": self.unit, "rows_per_user": self.rows, "user_gradient": self.gradient}

    @property
    def digest(self) -> str:
        """Of who is whose, for ranks that must agree."""
        return hashlib.sha256(bytes_of(self.of_row)).hexdigest()[:16]

    def groups(self, loader: Any, layout: Mapping[str, Any]) -> Callable[[int, Any], Groups]:
        """From a number of rows, and the inputs that they are of, to which of them are one person's.

        The rows are those of the batch that ``loader`` last handed out, in its order: a collate_fn or a loop that is seen to
        change the order is refused. In the loop that is looked for in the first batches, of inputs that were not changed.
        """
        draws, mean, dim = loader.draws, self.gradient == "mean", 0 if layout["batch_first"] else 1
        _check_collate(loader, dim, layout["augmentations"])
        looks = iter(range(_LOOKS))

        def of_batch(rows: int, inputs: Any) -> Groups:
            groups = Groups.of_people(draws.sizes, rows, layout["augmentations"], mean=mean)
            if inputs is not None and shows_order(rows, len(groups.sizes)) and next(looks, None) is not None:
                _check_loop(tensors_in(inputs), tensors_in(draws.batch), dim)
            return groups

        return of_batch

    def rows_of(self, drawn: Tensor, uniform: Callable[[int], Tensor]) -> list[list[int]]:
        """The rows to use of each of the people ``drawn``. ``uniform(n)`` draws n numbers in [0, 1)."""
        counts = self.counts[drawn]
        ends = counts.cumsum(0)
        begins = ends - counts
        owner = torch.arange(len(drawn)).repeat_interleave(counts)
        place = torch.arange(len(owner)) - begins[owner]
        first = (self.counts.cumsum(0) - self.counts)[drawn]
        rows = self._by_person[first[owner] + place]
        if self.rows is not None and bool((counts > self.rows).any()):
            shuffled = torch.argsort(owner + uniform(len(owner)))  # within each person
            rows, counts = rows[shuffled][place < self.rows], counts.clamp(max=self.rows)
        return [part.tolist() for part in rows.split(counts.tolist())] if len(drawn) else []


def shows_order(rows: int, people: int) -> bool:
    """Whether it is seen of a batch if its rows are in another order."""
    return rows > _FEW and people > 1


def _check_collate(loader: Any, dim: int, views: int) -> None:
    """Refuse a collate_fn that orders rows, of so many ``views`` each, in a way of its own, such as by their length."""
    last = len(loader.dataset) - 1
    rows = [loader.dataset[i] for i in sorted({last * i // _FEW for i in range(_FEW + 1)})]
    forth, back = (tensors_in(loader.collate_fn(list(given))) for given in (rows, rows[::-1]))
    for one, other in zip(forth, back, strict=False):
        if other.dim() <= dim or other.shape[dim] % views:
            continue
        if _reordered(one, other.unflatten(dim, (-1, views)).flip(dim).flatten(dim, dim + 1), dim):
            fix = "Leave the rows of a batch in the order in which they are given"
            raise bad("data_loader", "collate_fn", "puts rows in another order, so that it is lost whose they are", fix)


def _check_loop(inputs: Sequence[Tensor], batch: Sequence[Tensor], dim: int) -> None:
    """Refuse inputs of the model that are those of the batch with its rows in another order."""
    for given in inputs:
        alike = [t for t in batch if t.shape == given.shape and t.dtype == given.dtype and t.dim() > dim]
        pairs = [(given.detach().to(t.device), t) for t in alike]
        if any(torch.equal(*pair) for pair in pairs):
            continue
        if any(_reordered(one, other, dim) and len(_kinds(one, dim)[0]) == one.shape[dim] for one, other in pairs):
            raise PrivacyError(
                "user_ids: the model was given the rows of its batch in another order, so it is lost whose they are and no "
                "person could be clipped. Leave them in the order of the loader."
            )


def _reordered(one: Tensor, other: Tensor, dim: int) -> bool:
    """Whether they have the same rows in another order."""
    if one.shape != other.shape or one.dim() <= dim or torch.equal(one, other):
        return False
    return all(torch.equal(a, b) for a, b in zip(_kinds(one, dim), _kinds(other, dim), strict=True))


def _kinds(t: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The different rows, and how often each occurs."""
    rows = t.detach().movedim(dim, 0).flatten(1) if t.dim() > 1 else t.detach().unsqueeze(1)
    found: tuple[Tensor, Tensor] = rows.unique(dim=0, return_counts=True)
    return found


def _numbered(ids: Iterable[Any]) -> list[int]:
    known: dict[Any, int] = {}
    numbers = []
    for row, one in enumerate(ids):
        try:
            if one is None or one == "" or one != one:
                raise TypeError
            numbers.append(known.setdefault(one, len(known)))
        except TypeError:  # as a missing value of pandas raises when it is compared, or a list when it is hashed
            fix = "Give every row the id of its person, and leave out rows whose person is not known"
            raise bad("user_ids", one, f"row {row} has no id", fix) from None
    return numbers


def ends_of_parts(sizes: Sequence[int], most: int) -> list[int]:
    """After which people parts of at most so many rows end, but for the last."""
    ends, at = [], 0
    while (at := end_of_part(sizes, at, most)) < len(sizes):
        ends.append(at)
    return ends


def rows_of_people(sizes: Sequence[int], some: Tensor) -> Tensor:
    """The rows of some of the people of a batch, who have ``sizes`` rows each, one person's after another's."""
    counts = torch.tensor(sizes)
    first, own = (counts.cumsum(0) - counts)[some], counts[some]
    owner = torch.arange(len(some)).repeat_interleave(own)
    return first[owner] + torch.arange(len(owner)) - (own.cumsum(0) - own)[owner]


def end_of_part(sizes: Sequence[int], begin: int, most: int) -> int:
    """Where a part of at most ``most`` rows ends that begins with person ``begin`` of people with so many rows each.

    A person is never cut: one who has more rows than that is a part alone.
    """
    end, rows = begin + 1, sum(sizes[begin : begin + 1])
    while end < len(sizes) and rows + sizes[end] <= most:
        rows, end = rows + sizes[end], end + 1
    return end
