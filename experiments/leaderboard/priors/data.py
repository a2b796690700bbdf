"""CIFAR-10 on the device: to choose on 5,000 held-out training images, or to judge on the test set. Fashion-MNIST to judge."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpivon.data import Images, load_cifar10, load_fashion_mnist, normalised, tuning_split


@dataclass(frozen=True, eq=False)
class Split:
    """What is trained on, what temperatures are fitted on, and what is scored.

    To choose, temperatures are fitted on the images that are scored, and say how well one temperature could do. To judge, they
    are fitted on the validation images, which are then part of the training set; that is not charged, and stands for the
    private temperature of the recipe.
    """

    name: str
    images: Tensor
    labels: Tensor
    fit_images: Tensor
    fit_labels: Tensor
    score_images: Tensor
    score_labels: Tensor


def load_split(root: Path, device: torch.device, *, judge: bool, toy: bool, fashion: bool = False) -> Split:
    train, test = _fashion(root / "fashion-mnist") if fashion else cached(root)
    kept, held_out = tuning_split(train)
    if toy:
        kept, held_out, test = kept[np.arange(128)], held_out[np.arange(40)], test[np.arange(40)]
        train = kept
    parts = (train, held_out, test) if judge else (kept, held_out, held_out)
    tensors = [t.to(device) for part in parts for t in normalised(part)]
    return Split("fashion-mnist" if fashion else "test" if judge else "validation", *tensors)


def _fashion(root: Path) -> tuple[Images, Images]:
    """Of CIFAR-10's size: with two black pixels around, and grey in three channels."""
    data = load_fashion_mnist(root)
    parts = (
        Images(np.pad(p.pixels, ((0, 0), (2, 2), (2, 2), (0, 0))).repeat(3, 3), p.labels)
        for p in (data.train, data.test)
    )
    return next(parts), next(parts)


def cached(root: Path) -> tuple[Images, Images]:
    """The verified data set; beside it in plain bytes after the first time, since decoding takes half a minute."""
    path = root / "verified.npz"
    if path.is_file():
        with np.load(path, allow_pickle=False) as file:
            return Images(file["x"], file["y"]), Images(file["test_x"], file["test_y"])
    data = load_cifar10(root)
    partial = root / f"verified.{os.getpid()}.npz"  # two processes may be the first
    arrays = {"x": data.train.pixels, "y": data.train.labels, "test_x": data.test.pixels, "test_y": data.test.labels}
    try:
        np.savez(partial, **arrays)
        partial.replace(path)
    except OSError:  # a folder that cannot be written to
        pass
    return data.train, data.test
