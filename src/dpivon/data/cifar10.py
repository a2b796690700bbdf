"""CIFAR-10 (Krizhevsky, 2009): 50,000 + 10,000 colour images of 32×32, ten classes."""

from __future__ import annotations

import io
import math
import pickle
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dpivon.data.images import DataSet, Images, canonical
from dpivon.errors import ArgumentError, bad

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE, TRAIN, TEST = 32, 50_000, 10_000
_RECORD = 1 + 3 * SIDE * SIDE
_MOST = 10_000 * (_RECORD + 200)  # bytes of a file in an archive
# Digests (images.py) of the published training and test sets.
TRAIN_DIGEST = "d59acf989e068e709ce686cda292672c7b212c08d29d3d3e6d8c3aa99eba6a85"
TEST_DIGEST = "899683d46c3a8c66fd56e1af12202e69fe5a4517be10b0f68e04c78fe585c57c"

_FETCH = (
    "Run `dpivon data fetch cifar10`, or give the folder that holds cifar-10-binary.tar.gz or cifar-10-python.tar.gz"
)
_Open = Callable[[str], bytes]


def load_cifar10(root: str | Path) -> DataSet:
    """CIFAR-10 from a folder that holds either official archive or its unpacked folder, or from either itself.

    Whatever order the copy has, the result has one order. A copy that is not CIFAR-10 to the last byte is refused.
    """
    root = Path(root)
    raw = _read(root)
    if raw is None:
        problem = "holds no CIFAR-10" if root.exists() else "does not exist, so there is no CIFAR-10"
        raise bad("data", str(root), problem, _FETCH)
    parts = []
    for name, images, size, expected in (
        ("training", raw[0], TRAIN, TRAIN_DIGEST),
        ("test", raw[1], TEST, TEST_DIGEST),
    ):
        if len(images) != size:
            raise bad("data", str(root), f"has {len(images)} {name} images instead of {size}", _FETCH)
        images, found = canonical(images)
        if found != expected:
            problem = f"its {name} images are not those of CIFAR-10 (digest {found[:12]}…): the copy is damaged"
            raise bad("data", str(root), problem, _FETCH)
        parts.append(images)
    return DataSet("cifar10", parts[0], parts[1], verified=True)


def _read(root: Path) -> tuple[Images, Images] | None:
    """Training and test images as they stand, unchecked; None if nothing here looks like CIFAR-10."""
    for base in (root, root / "cifar-10-batches-bin", root / "cifar-10-batches-py"):
        for probe, read in (("data_batch_1.bin", _binary), ("data_batch_1", _python)):
            if (base / probe).is_file():
                return read(_from_folder(base))
    for archive in (root, root / "cifar-10-binary.tar.gz", root / "cifar-10-python.tar.gz"):
        if archive.is_file():
            return _from_archive(archive)
    return None


def _from_folder(folder: Path) -> _Open:
    def open_(name: str) -> bytes:
        path = folder / name
        if not path.is_file():
            raise bad("data", str(folder), f"lacks {name}", _FETCH)
        return path.read_bytes()

    return open_


def _from_archive(path: Path) -> tuple[Images, Images]:
    """Members are read in memory: nothing is unpacked, so no path in the archive can lead anywhere."""
    try:
        with tarfile.open(path, "r:*") as archive:
            found = [m for m in archive if m.isfile() and "_batch" in Path(m.name).name and m.size < _MOST]
            files = {Path(m.name).name: (archive.extractfile(m) or io.BytesIO()).read() for m in found}
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise bad("data", str(path), f"is not a whole archive ({error})", _FETCH) from None

    def open_(name: str) -> bytes:
        if name not in files:
            raise bad("data", str(path), f"lacks {name}", _FETCH)
        return files[name]

    return _binary(open_) if "data_batch_1.bin" in files else _python(open_)


def _binary(open_: _Open) -> tuple[Images, Images]:
    def images(name: str) -> Images:
        raw = np.frombuffer(open_(name), np.uint8)
        if len(raw) % _RECORD:
            raise bad("data", name, f"is {len(raw)} bytes, not a multiple of {_RECORD}", _FETCH)
        records = raw.reshape(-1, _RECORD)
        return Images(_rows(records[:, 1:]), records[:, 0])

    return _joined([images(f"data_batch_{i}.bin") for i in range(1, 6)]), images("test_batch.bin")


def _python(open_: _Open) -> tuple[Images, Images]:
    def images(name: str) -> Images:
        batch = read_pickle(open_(name), name)
        pixels, labels = batch.get("data"), batch.get("labels")
        if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _RECORD - 1:
            raise bad("data", name, "holds no array of images", _FETCH)
        whole = isinstance(labels, list) and all(isinstance(y, int) and 0 <= y < 10 for y in labels)
        if not whole or len(labels) != len(pixels):  # type: ignore[arg-type]
            raise bad("data", name, "does not hold one label from 0 to 9 per image", _FETCH)
        return Images(_rows(pixels), np.array(labels, np.uint8))

    return _joined([images(f"data_batch_{i}") for i in range(1, 6)]), images("test_batch")


def _rows(pixels: np.ndarray) -> np.ndarray:
    """From 1,024 red, green and blue bytes to [N, 32, 32, 3]."""
    return np.ascontiguousarray(pixels.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))


def _joined(parts: list[Images]) -> Images:
    return Images(np.concatenate([p.pixels for p in parts]), np.concatenate([p.labels for p in parts]))


# ---- its Python version, read without executing its pickles
#
# A pickle is a program: ``pickle.load`` calls whatever it names. Here pickle's interpreter has the instructions that those
# files use and no others, and the three names of numpy they mention stand for the classes below: nothing is imported, nothing
# else can be called, and arrays are built from their bytes here.

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
