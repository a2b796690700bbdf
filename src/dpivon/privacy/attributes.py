"""What a model keeps beside its parameters and buffers: tensors, numbers and containers of them, as plain attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_OWN = set(vars(nn.Module())) | {"forward"}  # of torch's, and what a book-keeper puts there


class Attributes:
    """The plain attributes of every layer as they are now, to be compared and put back."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = dict(module.named_modules())
        self._before = {
            name: {key: (value, _copy(value)) for key, value in _held(layer).items()}
            for name, layer in self._layers.items()
        }

    def changed(self) -> list[str]:
        """The names of those that are not what they were."""
        return [f"{name}.{key}".lstrip(".") for name, key, _ in self._changes()]

    def state(self) -> dict[tuple[str, str], Any]:
        """Copies of all of them as they are now."""
        return {(n, key): _copy(v) for n, layer in self._layers.items() for key, v in _held(layer).items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Make them what they were."""
        for name, key, before in self._changes():
            held = self._layers[name].__dict__
            if before is None:
                del held[key]
                continue
            value, copy = before
            if isinstance(value, Tensor):
                value.detach().copy_(copy)
                held[key] = value
            else:
                held[key] = _copy(copy)

    def _changes(self) -> list[tuple[str, str, tuple[Any, Any] | None]]:
        found: list[tuple[str, str, tuple[Any, Any] | None]] = []
        for name, layer in self._layers.items():
            now, before = _held(layer), self._before[name]
            found += [(name, key, None) for key in now.keys() - before.keys()]
            found += [(name, key, was) for key, was in before.items() if not _same(now.get(key), was[1])]
        return found


def different(a: dict[tuple[str, str], Any], b: dict[tuple[str, str], Any]) -> list[str]:
    """The names of attributes in which two states differ."""
    return [".".join(at).lstrip(".") for at in a.keys() | b.keys() if not _same(a.get(at), b.get(at))]


def marks(module: nn.Module) -> dict[tuple[str, str], Any]:
    """For every attribute that is a tensor, a number or a container, what changes when it does; quickly."""
    return {
        (name, key): _mark(value)
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if isinstance(value, Tensor | float | int | list | dict | set) and key not in _OWN
    }


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    return value if isinstance(value, float | int) else len(value)


def _held(layer: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(layer).items() if key not in _OWN and _plain(value)}


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_plain(v) for v in value.values())
    if isinstance(value, list | tuple | set):
        return not hasattr(value, "_fields") and all(_plain(v) for v in value)
    return value is None or isinstance(value, Tensor | bool | int | float | complex | str)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copy(v) for key, v in value.items()}
    return type(value)(_copy(v) for v in value) if type(value) in (list, tuple, set) else value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
