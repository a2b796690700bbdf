"""Read the pickles of CIFAR-10's Python version without executing them.

A pickle is a program: ``pickle.load`` calls whatever it names. Here a small interpreter knows the opcodes that those
files use and the three names of numpy they mention, builds arrays from their bytes itself, and refuses all else.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpivon.errors import ArgumentError, bad

_RECONSTRUCT, _NDARRAY, _DTYPE = "_reconstruct", "ndarray", "dtype"
_NAMES = {
    "numpy.core.multiarray _reconstruct": _RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": _RECONSTRUCT,
    "numpy ndarray": _NDARRAY,
    "numpy dtype": _DTYPE,
}
_MARK = object()
_PUSHED: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "MARK": lambda: _MARK,
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple,
}  # fmt: skip
_CONSTANTS = {"BININT", "BININT1", "BININT2", "BINSTRING", "SHORT_BINSTRING", "BINUNICODE"}
_FIX = "Use the archive from https://www.cs.toronto.edu/~kriz/cifar.html"


@dataclass
class _Name:
    """A name that the pickle mentions; nothing is imported for it."""

    name: str


@dataclass
class _Type:
    """A numpy dtype under construction: only unsigned bytes are ever made of it."""

    code: str


@dataclass
class _Array:
    """A numpy array under construction."""

    value: np.ndarray | None = None

    def build(self, state: Any) -> None:
        _version, shape, kind, fortran, text = state
        if not isinstance(kind, _Type) or kind.code != "u1" or not isinstance(text, str):
            raise TypeError("an array that is not of bytes")
        if any(not isinstance(side, int) or side < 0 for side in shape):
            raise TypeError(f"an array of shape {shape}")
        raw = text.encode("latin-1")  # how pickletools decoded it
        if len(raw) != math.prod(shape):
            raise ValueError(f"{len(raw)} bytes for an array of shape {shape}")
        self.value = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


def read_pickle(data: bytes, name: str) -> dict[str, Any]:
    """The dictionary in a CIFAR-10 batch. ``name`` is what errors call the file."""
    try:
        value = _Machine().run(data)
    except ArgumentError:
        raise
    except Exception as error:  # any malformed program ends here: index, key, type and value errors alike
        raise bad("data", name, f"is not a CIFAR-10 pickle ({type(error).__name__}: {error})", _FIX) from None
    if not isinstance(value, dict):
        raise bad("data", name, "holds no dictionary", _FIX)
    return {k: v.value if isinstance(v, _Array) else v for k, v in value.items()}


class _Machine:
    """A stack, a memo, and one branch per opcode."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, argument, _position in pickletools.genops(data):
            if opcode.name == "STOP":
                return self.stack.pop()
            self._do(opcode.name, argument)
        raise ValueError("it ends without STOP")

    def _do(self, op: str, argument: Any) -> None:
        stack = self.stack
        if op in _CONSTANTS:
            stack.append(argument)
        elif op == "PROTO":
            pass
        elif op in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif op in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif op in _PUSHED:
            stack.append(_PUSHED[op]())
        elif op in ("TUPLE1", "TUPLE2", "TUPLE3"):
            n = int(op[-1])
            stack[-n:] = [tuple(stack[-n:])]
        elif op == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif op in ("APPEND", "APPENDS"):
            values = [stack.pop()] if op == "APPEND" else self._since_mark()
            stack[-1].extend(values)
        elif op in ("SETITEM", "SETITEMS"):
            items = [stack.pop(-2), stack.pop()] if op == "SETITEM" else self._since_mark()
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif op == "GLOBAL":
            if argument not in _NAMES:
                raise bad("data", str(argument), "is a name that a CIFAR-10 pickle has no use for", _FIX)
            stack.append(_Name(_NAMES[argument]))
        elif op == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_call(function, arguments))
        elif op == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], _Array):
                stack[-1].build(state)
            elif not isinstance(stack[-1], _Type):
                raise TypeError(f"state for {type(stack[-1]).__name__}")
        else:
            raise bad("data", op, "is an instruction that a CIFAR-10 pickle has no use for", _FIX)

    def _since_mark(self) -> list[Any]:
        at = max(i for i, value in enumerate(self.stack) if value is _MARK)
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values


def _call(function: Any, arguments: Any) -> Any:
    """The two calls those files make, played by hand."""
    name = function.name if isinstance(function, _Name) else None
    if name == _DTYPE and isinstance(arguments[0], str):
        return _Type(arguments[0])
    if name == _RECONSTRUCT and arguments[0] == _Name(_NDARRAY):
        return _Array()
    raise TypeError("a call that a CIFAR-10 pickle does not make")
