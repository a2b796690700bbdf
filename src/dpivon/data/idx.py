"""The IDX format of MNIST and its relatives: two zero bytes, a type, the number of sides, the sides, the bytes."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from dpivon.errors import bad

_BYTES = 0x08
_MOST = 1 << 30  # bytes of a file: twenty times MNIST


def read_idx(path: Path, fix: str) -> np.ndarray:
    """Unsigned bytes of any shape; a ``.gz`` is unpacked on the way."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            raw = file.read(_MOST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise bad("data", str(path), f"cannot be unpacked ({error})", fix) from None
    if len(raw) > _MOST:
        raise bad("data", str(path), f"holds more than {_MOST} bytes", fix)
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != _BYTES:
        raise bad("data", str(path), "is not an IDX file of bytes", fix)
    start = 4 + 4 * raw[3]
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4)]
    if len(raw) - start != math.prod(shape):
        raise bad("data", str(path), f"has {len(raw) - start} bytes for a shape of {shape}", fix)
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
