"""The part of the training set on which learning rates are chosen."""

from __future__ import annotations

import numpy as np

from dpivon.data.records import Images
from dpivon.errors import bad

SEED = 2024  # public: the split is part of the study, and follows no run's seed
SHARE = 10  # one in ten is held out: 45,000 + 5,000 of CIFAR-10


def tuning_split(train: Images) -> tuple[Images, Images]:
    """(nine tenths to train on, one tenth to choose by); the test set stays out of it."""
    if len(train) < SHARE:
        raise bad("train", len(train), "is too few to split", f"Give at least {SHARE} examples")
    order = np.random.Generator(np.random.PCG64(SEED)).permutation(len(train))
    cut = len(train) // SHARE
    return train[np.sort(order[cut:])], train[np.sort(order[:cut])]
