"""Tensors inside what a model takes and returns: nested tuples, lists, mappings, and objects that hold tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nested value, in order."""
    return list(_tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for part in _parts(value).values():
            yield from _tensors(part)


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
