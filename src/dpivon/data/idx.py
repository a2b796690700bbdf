"""The IDX format of MNIST and its relatives: two zero bytes, a type, the number of sides, the sides, the bytes."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

from dpivon.errors import bad

_BYTES = 0x08


def read_idx(path: Path, fix: str) -> np.ndarray:
    """Unsigned bytes of any shape; a ``.gz`` is unpacked on the way."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise bad("data", str(path), f"cannot be unpacked ({error})", fix) from None
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != _BYTES:
        raise bad("data", str(path), "is not an IDX file of bytes", fix)
    start = 4 + 4 * raw[3]
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4)]
    expected = int(np.prod(shape, dtype=np.int64))
    if len(raw) - start != expected:
        raise bad("data", str(path), f"has {len(raw) - start} bytes for a shape of {shape}", fix)
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
