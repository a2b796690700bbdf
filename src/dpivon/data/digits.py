"""The digits of scikit-learn: 1,797 real 8×8 scans of handwritten digits (UCI, test part), shipped with that package.

They are public, as data of a demonstration should be. Training and test digits may share a writer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    """``train`` has 1,297 digits; ``validation`` (200) chose hyperparameters; ``test`` (300) is for final scores only."""

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
