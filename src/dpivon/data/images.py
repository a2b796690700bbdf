"""Labelled images as bytes: their order-independent digest, the split for tuning, and what a network sees of them.

Pixels are scaled by constants that owe nothing to the data: (x/255 − .5)/.25, in [−2, 2]. The usual mean and standard deviation
of CIFAR-10 (.47 and .25) are statistics of the training set, and using them would release them outside of every account.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpivon.errors import bad

#: What is subtracted from a pixel in [0, 1], and what it is then divided by: public constants, not statistics of any data.
MEAN = 0.5
#: See ``MEAN``.
STD = 0.25
SEED = 2024  # of the split for tuning; public, and part of every study
SHARE = 10  # one in ten is held out: 45,000 + 5,000 of CIFAR-10


@dataclass(frozen=True, eq=False)
class Images:
    """``pixels`` [N, H, W, channels] and ``labels`` [N], both whole bytes as in the files."""

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: np.ndarray) -> Images:
        return Images(self.pixels[index], self.labels[index])


@dataclass(frozen=True, eq=False)
class DataSet:
    """``verified`` says whether the content is known to be the published one."""

    name: str
    train: Images
    test: Images
    verified: bool


def canonical(images: Images) -> tuple[Images, str]:
    """The records sorted by their SHA-256, and the digest over the sorted hashes.

    A record is one label byte, then the pixels as [H, W, channels]. Copies of a data set in different orders become the same
    array, so a seeded split or batch picks the same images from both; a copy in which one byte differs has another digest.
    """
    pixels = np.ascontiguousarray(images.pixels, dtype=np.uint8)
    labels = images.labels.astype(np.uint8)
    hashes = [hashlib.sha256(labels[i : i + 1].tobytes() + pixels[i].tobytes()).digest() for i in range(len(images))]
    order = sorted(range(len(hashes)), key=hashes.__getitem__)
    whole = hashlib.sha256(b"".join(hashes[i] for i in order))
    return images[np.array(order, dtype=np.int64)], whole.hexdigest()


def digest(images: Images) -> str:
    """The order-independent digest."""
    return canonical(images)[1]


def tuning_split(train: Images) -> tuple[Images, Images]:
    """(nine tenths to train on, one tenth to choose learning rates by); the test set stays out of it."""
    kept, held_out = tuning_places(len(train))
    return train[kept], train[held_out]


def tuning_places(examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of so many training examples are kept, and which tenth is held out."""
    if examples < SHARE:
        raise bad("train", examples, "is too few to split", f"Give at least {SHARE} examples")
    return split_places(examples, examples // SHARE, SEED)


def split_places(examples: int, held_out: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(all places but ``held_out``, those) by a public seed, each in order."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(examples)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def normalised(images: Images) -> tuple[Tensor, Tensor]:
    """(pixels [N, channels, H, W] in fp32, scaled by MEAN and STD; labels [N])."""
    pixels = torch.from_numpy(images.pixels.transpose(0, 3, 1, 2).astype("float32")).contiguous().div_(255.0)
    return pixels.sub_(MEAN).div_(STD), torch.from_numpy(images.labels.astype("int64"))


PIXEL_RANGE = 16.0  # a public constant of the data format: normalising by statistics of the data would leak them
_SPLIT_SEED = 2024  # the split is part of the data set, so it does not follow the seed of a run


@dataclass(frozen=True, eq=False)
class Split:
    """Images [n, 1, 8, 8] in [0, 1] and their labels [n]."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Digits:
    """scikit-learn's 1,797 real 8×8 scans of handwritten digits (UCI, test part): public, as a demonstration's data should be.

    ``train`` has 1,297 digits; ``validation`` (200) chose hyperparameters; ``test`` (300) is for final scores only. Training
    and test digits may share a writer.
    """

    train: Split
    validation: Split
    test: Split


def load_digits() -> Digits:
    """The same three disjoint parts every time."""
    from sklearn.datasets import load_digits as load

    raw = load()
    x = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / PIXEL_RANGE
    y = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    return Digits(*(Split(x[part], y[part]) for part in order.split([1297, 200, 300])))
