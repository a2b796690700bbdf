"""Small copies of the official layouts, made byte by byte."""

from __future__ import annotations

import io
import struct
import tarfile

import numpy as np


def pictures(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(rows of 3,072 bytes, labels)."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3072), np.uint8), rng.integers(0, 10, n).astype(np.uint8)


def binary(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    return np.concatenate([labels[:, None], pixels], 1).tobytes()


def short(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text


def batch_pickle(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """The program that Python 2's cPickle wrote into data_batch_1: protocol 2, byte strings, one numpy array."""
    raw = pixels.tobytes()
    out = b"\x80\x02}q\x01(" + short(b"batch_label") + b"q\x02" + short(b"training batch 1 of 5") + b"q\x03"
    out += short(b"labels") + b"q\x04]q\x05(" + b"".join(b"K" + bytes([y]) for y in labels) + b"e"
    out += short(b"data") + b"q\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85"
    out += short(b"b") + b"\x87Rq\x09(K\x01M" + struct.pack("<H", len(pixels)) + b"M\x00\x0c\x86"
    out += b"cnumpy\ndtype\nq\x0a" + short(b"u1") + b"K\x00K\x01\x87Rq\x0b(K\x03" + short(b"|")
    out += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    return out + short(b"filenames") + b"q\x0c]q\x0d(" + short(b"a.png") * len(labels) + b"eu."


def tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def idx(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + b"".join(struct.pack(">I", s) for s in array.shape) + array.tobytes()
