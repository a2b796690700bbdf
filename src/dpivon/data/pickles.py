"""Read the pickles of CIFAR-10's Python version without executing them.

A pickle is a program: ``pickle.load`` calls whatever it names. Here pickle's interpreter has the instructions that those
files use and no others, and the three names of numpy they mention stand for the classes below: nothing is imported, nothing
else can be called, and arrays are built from their bytes here.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np

from dpivon.errors import ArgumentError, bad

_RECONSTRUCT, _NDARRAY, _DTYPE = "_reconstruct", "ndarray", "dtype"
_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _DTYPE,
}
#: Numbers, texts, containers and constants; the memo; a name, a call, the state of what was called; the end.
_INSTRUCTIONS = b"JKMTUX" + b"(N\x88\x89})]ta\x85\x86\x87esu" + b"qrhj" + b"cRb" + b"\x80."
_FIX = "Use the archive from https://www.cs.toronto.edu/~kriz/cifar.html"


def read_pickle(data: bytes, name: str) -> dict[str, Any]:
    """The dictionary in a CIFAR-10 batch. ``name`` is what errors call the file."""
    try:
        value = _Interpreter(io.BytesIO(data), encoding="latin-1").load()
    except ArgumentError:
        raise
    except Exception as error:  # any malformed program ends here: index, key, type and value errors alike
        raise bad("data", name, f"is not a CIFAR-10 pickle ({type(error).__name__}: {error})", _FIX) from None
    if not isinstance(value, dict):
        raise bad("data", name, "holds no dictionary", _FIX)
    return {k: v.value if isinstance(v, _Array) else v for k, v in value.items()}


class _Known(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        raise bad("data", chr(code), "is an instruction that a CIFAR-10 pickle has no use for", _FIX)


class _Interpreter(pickle._Unpickler):
    """The one in Python: the one in C makes room for any place in the memo that a file names."""

    dispatch = _Known({code: pickle._Unpickler.dispatch[code] for code in _INSTRUCTIONS})

    def find_class(self, module: str, name: str) -> _Name:
        if (module, name) not in _NAMES:
            raise bad("data", f"{module} {name}", "is a name that a CIFAR-10 pickle has no use for", _FIX)
        return _Name(_NAMES[module, name])


class _Name:
    """A name that the pickle mentions, and the two calls that those files make."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, first: Any, *others: Any) -> _Type | _Array:
        if self.name == _DTYPE and isinstance(first, str):
            return _Type(first)
        if self.name == _RECONSTRUCT and isinstance(first, _Name) and first.name == _NDARRAY:
            return _Array()
        raise TypeError("a call that a CIFAR-10 pickle does not make")

    def __setstate__(self, state: Any) -> None:
        raise TypeError(f"state for {self.name}")


class _Type(str):
    """A numpy dtype under construction: only unsigned bytes are ever made of it."""

    def __setstate__(self, state: Any) -> None:
        """Of a dtype only its code matters."""


class _Array:
    """A numpy array under construction."""

    value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _version, shape, kind, fortran, text = state
        if not isinstance(kind, _Type) or kind != "u1" or type(text) is not str:
            raise TypeError("an array that is not of bytes")
        if any(not isinstance(side, int) or side < 0 for side in shape):
            raise TypeError(f"an array of shape {shape}")
        raw = text.encode("latin-1")  # how it was decoded
        if len(raw) != math.prod(shape):
            raise ValueError(f"{len(raw)} bytes for an array of shape {shape}")
        self.value = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")
