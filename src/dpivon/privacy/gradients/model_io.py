"""What a model takes and returns: tensors in nested values, and the model as its caller goes on using it.

An empty batch is run as one made-up example whose output is cut off again, so that every layer can run it. Its gradient is
exactly zero, and the release with its noise still happens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.utils.module_utils import has_trainable_params
from torch import Tensor, nn

if TYPE_CHECKING:
    from dpivon.privacy.gradients.bookkeeping import BookKeeper

IGNORED = -100  # torch's default ignore_index


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nested value, in order."""
    return list(_tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for part in _parts(value).values():
            yield from _tensors(part)


def others_in(value: Any) -> list[Any]:
    """What a nested value holds besides tensors, containers aside."""
    if isinstance(value, Tensor):
        return []
    parts = _parts(value)
    return [value] if not parts and value not in ((), [], {}) else [o for p in parts.values() for o in others_in(p)]


def map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """The same nested value with ``fn`` of every tensor. Nothing that is given is changed."""
    if isinstance(value, Tensor):
        return fn(value)
    parts = _parts(value)
    mapped = {key: map_tensors(fn, part) for key, part in parts.items()}
    if all(mapped[key] is part for key, part in parts.items()):
        return value
    if isinstance(value, tuple | list):
        return type(value)(*mapped.values()) if hasattr(value, "_fields") else type(value)(mapped.values())
    made = copy.copy(value)
    for key, part in mapped.items():
        if isinstance(value, Mapping):
            made[key] = part
        else:
            object.__setattr__(made, key, part)  # also of a frozen dataclass
    return made


def structure(value: Any) -> Any:
    """What two values have in common that differ in numbers and sizes only; it can be compared and hashed."""
    if isinstance(value, Tensor):
        return value.dim(), value.dtype
    parts = _parts(value)
    if not parts:
        return type(value).__name__
    return type(value).__name__, tuple((key, structure(part)) for key, part in parts.items())


def _parts(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    fields = getattr(value, "__dict__", None)  # a dataclass, or an object that holds tensors among other things
    if fields is None or isinstance(value, type) or callable(value):
        return {}
    return {key: part for key, part in fields.items() if isinstance(part, Tensor | Mapping | tuple | list)}


def has_ignored(value: Any) -> bool:
    """Whether any integer is one that torch's losses leave out of their mean."""
    return any(bool((t == IGNORED).any()) for t in tensors_in(value) if t.dtype in (torch.int64, torch.int32))


class _EmptyBatch:
    keeper: BookKeeper

    def _fill(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The inputs with one made-up example, or None if the batch is not empty."""
        dim, rows = self.keeper.dim, self.keeper.augmentations
        if not any(t.dim() > dim and t.shape[dim] == 0 for t in tensors_in((args, kwargs))):
            return None
        filled: tuple[Any, Any] = map_tensors(lambda t: _with_rows(t, dim, rows), (args, kwargs))
        return filled

    def _cut(self, output: Any) -> Any:
        dim = self.keeper.dim
        return map_tensors(lambda t: t.narrow(dim, 0, 0) if t.dim() > dim else t, output)


class BookKeepingModule(_EmptyBatch, AbstractGradSampleModule):  # type: ignore[misc]
    """The model, wrapped."""

    def __init__(self, m: nn.Module, keeper: BookKeeper) -> None:
        super().__init__(m, batch_first=keeper.batch_first, loss_reduction=keeper.loss_reduction)
        self.keeper = keeper

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        filled = self._fill(args, kwargs)
        if filled is None:
            return super().forward(*args, **kwargs)
        return self._cut(super().forward(*filled[0], **filled[1]))

    def forbid_grad_accumulation(self) -> None:
        self.keeper.accumulates = False

    def allow_grad_accumulation(self) -> None:
        self.keeper.accumulates = True

    def remove_hooks(self) -> None:
        self.keeper.detach_from_model()


class BookKeepingHooks(_EmptyBatch):
    """A model that is not wrapped: forward hooks on it do the same.

    A model that is itself a single layer is left alone: its own backward hook would see the output after it was cut.
    """

    _was_empty = False

    def __init__(self, m: nn.Module, keeper: BookKeeper) -> None:
        self._module, self.batch_first, self.keeper = m, keeper.batch_first, keeper
        if not has_trainable_params(m):
            # Functions, which a deep copy of the model shares; and first of all, so that rows of the filled batch are counted.
            m.register_forward_pre_hook(lambda *given: self._before(*given), with_kwargs=True, prepend=True)
            m.register_forward_hook(lambda *given: self._after(*given))

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self.keeper.rehearses:
            return None
        filled = self._fill(args, kwargs)
        self._was_empty = filled is not None
        return filled

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._cut(output) if self._was_empty and not self.keeper.rehearses else output

    def cleanup(self) -> None:
        self.keeper.detach_from_model()


def _with_rows(t: Tensor, dim: int, rows: int) -> Tensor:
    if t.dim() <= dim or t.shape[dim] != 0:
        return t
    shape = list(t.shape)
    shape[dim] = rows
    return torch.zeros(shape, dtype=t.dtype, device=t.device)
