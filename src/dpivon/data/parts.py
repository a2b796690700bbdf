"""CIFAR-10 as three small files of lossless WebP: train-0.npz, train-1.npz, test.npz.

Half the size of the official archive, for machines that take files of limited size. Needs Pillow.
"""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dpivon.data.records import Images
from dpivon.errors import bad

FILES = ("train-0.npz", "train-1.npz", "test.npz")


def read_parts(folder: Path) -> tuple[Images, Images]:
    """Training and test pictures, unchecked."""
    for name in FILES:
        if not (folder / name).is_file():
            raise bad("data", str(folder), f"lacks {name}", f"Copy all of {', '.join(FILES)}")
    first, second, test = (_read(folder / name) for name in FILES)
    pixels, labels = (np.concatenate(pair) for pair in zip(first, second, strict=True))
    return Images(pixels, labels), Images(*test)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        from PIL import Image
    except ImportError:
        raise bad(
            "data", str(path), "is WebP, which needs Pillow", "Install pillow, or use the official layout"
        ) from None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as part:
            blob, offsets, labels = part["webp"], part["offsets"], part["labels"]

        def decode(i: int) -> np.ndarray:
            return np.asarray(Image.open(io.BytesIO(blob[offsets[i] : offsets[i + 1]].tobytes())).convert("RGB"))

        with ThreadPoolExecutor() as pool:
            return np.stack(list(pool.map(decode, range(len(labels))))), labels.astype(np.uint8)
    except Exception as error:  # zip, npy and WebP each fail in their own ways
        raise bad("data", str(path), f"is damaged ({type(error).__name__}: {error})", "Copy it again") from None
