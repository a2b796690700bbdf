"""Made-up inputs of a given structure, and randomness that does not depend on who is in the batch.

Whether rows of a model depend on each other can be found out without anyone's data: see
:mod:`dpivon.privacy.independence`. Only shapes, types and sizes of embeddings are used of what is given.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpivon.errors import PrivacyError
from dpivon.privacy.gradients.model_io import IGNORED, map_tensors


class NotTried(PrivacyError):
    """No made-up inputs could be found that the model or the loss takes."""


@dataclass(frozen=True)
class Kind:
    """How numbers are made up: from a normal or, for models that want it, uniform in (0, 1); whole ones below ``classes``.

    Some of the integers of the tensor at place ``ignored``, counting those of integers, are -100. A sequence of integers ends
    with ``end``, which it has nowhere else.
    """

    normal: bool
    classes: int
    ignored: int | None = None
    end: int | None = None


def kinds(module: nn.Module) -> list[Kind]:
    """The ways to make up inputs for a model, in the order in which they are tried."""
    tables = [layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    ids = min(tables, default=2)
    end = getattr(getattr(module, "config", None), "eos_token_id", None)  # of a language model, which may look for it
    ended = [Kind(True, ids, end=end)] if isinstance(end, int) and 0 <= end < ids else []
    return [Kind(True, ids), *ended, Kind(False, min(ids, 2)), Kind(False, 1)]


def dim_of_rows(t: Tensor, rows: int, dim: int) -> int | None:
    """Which dimension holds the rows of the batch: ``dim``, or the only one, as labels have it; None if there are none."""
    at = min(dim, t.dim() - 1)
    return at if at >= 0 and t.shape[at] == rows else None


def made_up(value: Any, rows: int, given: int, dim: int, kind: Kind, dtype: torch.dtype) -> Any:
    """A nested value like the given one, with ``rows`` rows in place of ``given``; tensors without rows stay as they are."""
    generator, integers = torch.Generator().manual_seed(0), itertools.count()

    def one(t: Tensor) -> Tensor:
        ignored = not t.is_floating_point() and t.dtype != torch.bool and next(integers) == kind.ignored
        at = dim_of_rows(t, given, dim)
        if at is None:
            return t.to(dtype) if t.is_floating_point() else t
        shape = list(t.shape)
        shape[at] = rows
        made = _numbers(shape, t, kind, dtype, generator)
        if ignored:  # of the second row all, of the third one
            made.select(at, 1).fill_(IGNORED)
            made.select(at, 2).reshape(-1)[:1] = IGNORED
        return made.to(t.device)

    return map_tensors(one, value)


def _numbers(shape: list[int], like: Tensor, kind: Kind, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if like.is_floating_point() or like.is_complex():
        draw = torch.randn if kind.normal else torch.rand
        return draw(shape, generator=generator, dtype=torch.cdouble if like.is_complex() and kind.normal else dtype)
    if like.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    numbers = torch.randint(0, kind.classes, shape, generator=generator)
    if len(shape) == 1:  # labels: as many different ones as there are
        numbers = torch.arange(shape[0]) % kind.classes
    else:
        numbers[..., 0] = min(1, kind.classes - 1)  # a mask hides not all of a row
        if kind.end is not None:
            numbers[numbers == kind.end] = (kind.end + 1) % kind.classes
            numbers[..., -1] = kind.end
    return numbers.to(like.dtype)


def some_rows(value: Any, index: list[int], rows: int, dim: int) -> Any:
    """These rows of a made-up value."""
    chosen = torch.tensor(index)

    def one(t: Tensor) -> Tensor:
        at = dim_of_rows(t, rows, dim)
        return t if at is None else t.index_select(at, chosen.to(t.device))

    return map_tensors(one, value)


def poisoned(value: Any, row: int, rows: int, dim: int) -> Any | None:
    """The value with NaN in one row; None if it has no floating-point rows."""
    found = []

    def one(t: Tensor) -> Tensor:
        at = dim_of_rows(t, rows, dim)
        if not t.is_floating_point() or at is None:
            return t
        found.append(t)
        t = t.clone()
        t.select(at, row).fill_(torch.nan)
        return t

    made = map_tensors(one, value)
    return made if found else None


def scaled(value: Any, by: float, rows: int, dim: int) -> Any:
    """The value with its floating-point rows multiplied by a number."""
    return map_tensors(
        lambda t: t * by if t.is_floating_point() and dim_of_rows(t, rows, dim) is not None else t, value
    )


class _SameForEveryRow(TorchDispatchMode):
    """Random draws are a function of their place in a row and of their order, not of the batch; sorting is left alone.

    Dropout then drops the same in every row, so that rows together and rows alone can be compared. A permutation of rows is
    drawn as their reversal: one that is used to mix examples shows.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dim = dim
        self.lowered: torch.dtype | None = None  # the least precision that a double was cast to
        self._draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _check_indices(func.overloadpacket.__name__, args)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            out = func(*args, **kwargs)
            self._note_precision(func, args, out)
            return out
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            x, p = args[0], args[1]
            mask = self._uniform(x) >= p
            return x * mask / max(1.0 - p, 1e-9), mask
        if name.startswith("randperm"):
            return func(*args, **kwargs).sort(descending=True).values
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor) or not (draw := _DRAWS.get(name) or _DRAWS.get(name.rstrip("_"))):
            return out
        return out.copy_(draw(self._uniform(out), args, kwargs))

    def _note_precision(self, func: Any, args: Any, out: Any) -> None:
        casts = func.overloadpacket.__name__ == "_to_copy" and isinstance(out, Tensor) and out.is_floating_point()
        if casts and args[0].dtype == torch.float64 and out.dtype != torch.float64:
            bits = min(torch.finfo(t).bits for t in (out.dtype, self.lowered or out.dtype))
            self.lowered = out.dtype if torch.finfo(out.dtype).bits == bits else self.lowered

    def _uniform(self, like: Tensor) -> Tensor:
        """Numbers in (0, 1) of one row, for every row."""
        self._draws += 1
        device = like.device if like.is_cuda else torch.device("cpu")  # attention of 1024 tokens draws millions
        generator = torch.Generator(device).manual_seed(self._draws)
        shape = list(like.shape)
        if shape:
            shape[min(self._dim, len(shape) - 1)] = 1
        row = torch.rand(shape, generator=generator, dtype=torch.float64, device=device)
        return row.to(like.device).expand(like.shape)


def _check_indices(name: str, args: Any) -> None:
    """An error for made-up integers that are no index. A GPU would end the process's use of it where a CPU raises an error."""
    t: Any = args[0] if args else None
    found: list[tuple[Tensor, int]] = []
    if name == "embedding":
        found = [(args[1], len(args[0]))]
    elif name in ("gather", "index_select", "scatter", "scatter_add"):
        found = [(args[2], t.shape[args[1]] if t.dim() else 1)]
    elif name == "index":
        found = [(i, n) for i, n in zip(args[1], t.shape, strict=False) if i is not None and i.dtype != torch.bool]
    elif name in ("nll_loss_forward", "nll_loss2d_forward"):
        found = [(args[1][args[1] != args[4]], t.shape[min(1, t.dim() - 1)])]
    for index, size in found:
        lowest = -size if name == "index" else 0
        if index.numel() and not bool(((index >= lowest) & (index < size)).all()):
            raise IndexError(f"a made-up index is out of range for {name} of {size}")


def _below(u: Tensor, p: Any) -> Tensor:
    return (u < p).to(u)


_DRAWS: dict[str, Callable[[Tensor, Any, Any], Tensor]] = {
    "rand": lambda u, a, k: u,
    "rand_like": lambda u, a, k: u,
    "uniform": lambda u, a, k: _argument(a, k, 1, "from", 0.0) * (1 - u) + _argument(a, k, 2, "to", 1.0) * u,
    "randn": lambda u, a, k: _gaussian(u),
    "randn_like": lambda u, a, k: _gaussian(u),
    "normal": lambda u, a, k: _gaussian(u),
    "exponential": lambda u, a, k: -torch.log1p(-u),
    "bernoulli": lambda u, a, k: _below(u, _argument(a, k, 1, "p", a[0])),
    "bernoulli_": lambda u, a, k: _below(u, _argument(a, k, 1, "p", 0.5)),
}


def _argument(args: Any, kwargs: Any, place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _gaussian(u: Tensor) -> Tensor:
    return torch.special.ndtri(u.clamp(1e-9, 1 - 1e-9))


@contextmanager
def _in_full_precision() -> Iterator[None]:
    """Inside, an autocast that the model or the loss enters changes nothing: bf16 would hide what double precision shows."""
    original = torch.autocast.__enter__

    def entered(self: torch.autocast) -> Any:
        enabled, self._enabled = self._enabled, False
        try:
            return original(self)  # type: ignore[no-untyped-call]
        finally:
            self._enabled = enabled

    torch.autocast.__enter__ = entered  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = original  # type: ignore[method-assign]


@contextmanager
def randomness_kept(device: torch.device) -> Iterator[None]:
    """Inside, anything may be drawn; afterwards the caller's generators are as they were."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


@contextmanager
def same_for_every_row(device: torch.device, dim: int) -> Iterator[_SameForEveryRow]:
    """Inside, randomness is that of :class:`_SameForEveryRow`; the caller's generators are left as they were."""
    mode = _SameForEveryRow(dim)
    with randomness_kept(device), torch.autocast(device.type, enabled=False), _in_full_precision(), mode:
        random.seed(0)
        np.random.seed(0)
        yield mode
