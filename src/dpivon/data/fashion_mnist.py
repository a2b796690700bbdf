"""Fashion-MNIST (Xiao et al., 2017): 60,000 + 10,000 grey pictures of 28×28, ten classes, in IDX files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dpivon.data.idx import read_idx
from dpivon.data.records import DataSet, Images, canonical
from dpivon.errors import bad

SIZES = {"train": 60_000, "t10k": 10_000}
#: MD5 of the four files, as their authors publish them (github.com/zalandoresearch/fashion-mnist).
MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
_FIX = "Give the folder with the four files of Fashion-MNIST (Debian packages them as dataset-fashion-mnist)"


def load_fashion_mnist(root: str | Path) -> DataSet:
    """Fashion-MNIST from its four IDX files, gzipped or not.

    ``verified`` is True when all four are the published archives, by MD5. A copy that was unpacked or packed anew has
    no published checksum, so only its shape, its number of pictures and its classes' sizes are checked.
    """
    root = Path(root)
    paths = {name: _find(root, name) for name in MD5}
    verified = all(hashlib.md5(p.read_bytes()).hexdigest() == MD5[n] for n, p in paths.items())
    train, test = (_images(paths, part, size) for part, size in SIZES.items())
    return DataSet("fashion-mnist", train, test, verified)


def load_fashion_mnist_test(root: str | Path) -> Images:
    """Its test pictures alone, for studies that only look at them: two of the four files."""
    root = Path(root)
    paths = {name: _find(root, name) for name in MD5 if name.startswith("t10k")}
    return _images(paths, "t10k", SIZES["t10k"])


def _find(root: Path, name: str) -> Path:
    for path in (root / name, root / name.removesuffix(".gz")):
        if path.is_file():
            return path
    raise bad("data", str(root), f"lacks {name}" if root.exists() else "does not exist", _FIX)


def _images(paths: dict[str, Path], part: str, size: int) -> Images:
    where = paths[f"{part}-images-idx3-ubyte.gz"]
    pixels, labels = read_idx(where, _FIX), read_idx(paths[f"{part}-labels-idx1-ubyte.gz"], _FIX)
    if pixels.shape != (size, 28, 28) or labels.shape != (size,):
        raise bad("data", str(where), f"has shapes {pixels.shape} and {labels.shape}, not {size} pictures", _FIX)
    counts = [int((labels == c).sum()) for c in range(10)]
    if counts != [size // 10] * 10:
        raise bad("data", str(where), f"has {counts} pictures a class, not {size // 10}", _FIX)
    return canonical(Images(pixels[..., None], labels))[0]
