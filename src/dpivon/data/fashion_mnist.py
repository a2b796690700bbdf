"""Fashion-MNIST (Xiao et al., 2017): 60,000 + 10,000 grey images of 28×28, ten classes, in IDX files."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from pathlib import Path

import numpy as np

from dpivon.data.images import DataSet, Images, canonical
from dpivon.errors import bad

SIZES = {"train": 60_000, "t10k": 10_000}
#: MD5 of the four files, as their authors publish them (github.com/zalandoresearch/fashion-mnist).
MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
_BYTES = 0x08
_MOST = 1 << 30  # bytes of a file: twenty times MNIST
_FIX = "Give the folder with the four files of Fashion-MNIST (Debian packages them as dataset-fashion-mnist)"


def load_fashion_mnist(root: str | Path) -> DataSet:
    """Fashion-MNIST from its four IDX files, gzipped or not.

    ``verified`` is True when all four are the published archives, by MD5. A copy that was unpacked or packed anew has
    no published checksum, so only its shape, its number of images and its classes' sizes are checked.
    """
    root = Path(root)
    paths = {name: _find(root, name) for name in MD5}
    verified = all(hashlib.md5(p.read_bytes()).hexdigest() == MD5[n] for n, p in paths.items())
    train, test = (_images(paths, part, size) for part, size in SIZES.items())
    return DataSet("fashion-mnist", train, test, verified)


def _find(root: Path, name: str) -> Path:
    for path in (root / name, root / name.removesuffix(".gz")):
        if path.is_file():
            return path
    raise bad("data", str(root), f"lacks {name}" if root.exists() else "does not exist", _FIX)


def _images(paths: dict[str, Path], part: str, size: int) -> Images:
    where = paths[f"{part}-images-idx3-ubyte.gz"]
    pixels, labels = read_idx(where, _FIX), read_idx(paths[f"{part}-labels-idx1-ubyte.gz"], _FIX)
    if pixels.shape != (size, 28, 28) or labels.shape != (size,):
        raise bad("data", str(where), f"has shapes {pixels.shape} and {labels.shape}, not {size} images", _FIX)
    counts = [int((labels == c).sum()) for c in range(10)]
    if counts != [size // 10] * 10:
        raise bad("data", str(where), f"has {counts} images per class, not {size // 10}", _FIX)
    return canonical(Images(pixels[..., None], labels))[0]


def read_idx(path: Path, fix: str) -> np.ndarray:
    """An IDX file of unsigned bytes, gzipped or not: two zero bytes, a type, the number of sides, the sides, the bytes."""
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
