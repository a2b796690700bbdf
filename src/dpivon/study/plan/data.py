"""A plan's data and network, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpivon.data import MEAN, STD, Images, load_cifar10, load_digits, load_fashion_mnist, normalised, tuning_split
from dpivon.data.cifar10 import TRAIN
from dpivon.data.fashion_mnist import SIZES
from dpivon.data.images import SHARE
from dpivon.errors import bad
from dpivon.models import CompactCNN, PaperCNN, SmallCNN
from dpivon.privacy.kernels.paper.layout import Layout
from dpivon.stacked import AnyNetwork, Network, PaperNetwork
from dpivon.study.plan.plan import CLASSES, Plan


@dataclass(frozen=True, eq=False)
class StudyData:
    """What a study trains on and what it reports on: the test set, or the held-out tenth when tuning.

    ``ood`` are test images of the classes that a final study does not learn, if there are any.
    """

    images: Tensor  # [N, channels, H, W], normalised by public constants
    labels: Tensor
    eval_images: Tensor
    eval_labels: Tensor
    ood: Tensor | None = None

    @property
    def size(self) -> int:
        return len(self.labels)


def load_data(plan: Plan, root: Path, device: torch.device) -> StudyData:
    ood = None
    if plan.dataset == "digits":
        train_x, train_y, x, y = _digits(plan.split)
        if plan.classes:
            learned, shown = _among(train_y, plan.classes), _among(y, plan.classes)
            ood = x[~shown] if plan.split == "final" else None
            train_x, train_y, x, y = train_x[learned], train_y[learned], x[shown], y[shown]
    else:
        data = (load_cifar10 if plan.dataset == "cifar10" else load_fashion_mnist)(root)
        train, held_out = _only(data.train, plan.classes), _only(data.test, plan.classes)
        if plan.split == "tuning":
            train, held_out = tuning_split(train)
        elif plan.classes:
            others = [c for c in range(CLASSES) if c not in plan.classes]
            ood = normalised(_only(data.test, others))[0] if others else None
        train_x, train_y, x, y = (*normalised(train), *normalised(held_out))
    if plan.classes:
        train_y, y = (_renamed(labels, plan.classes) for labels in (train_y, y))
    train_x, train_y, x, y = (t.to(device) for t in (train_x, train_y, x, y))
    return StudyData(train_x, train_y, x, y, None if ood is None else ood.to(device))


def train_size(dataset: str, split: str, classes: Sequence[int]) -> int:
    """The public number of training examples, before the data are there: σ is calibrated to it."""
    if dataset == "digits":
        labels = _digits(split)[1]
        return int(_among(labels, classes).sum()) if classes else len(labels)
    whole = (TRAIN if dataset == "cifar10" else SIZES["train"]) * (len(classes) or CLASSES) // CLASSES
    return whole if split == "final" else whole - whole // SHARE


def _only(images: Images, classes: Sequence[int]) -> Images:
    return images[np.flatnonzero(np.isin(images.labels, list(classes)))] if classes else images


def _among(labels: Tensor, classes: Sequence[int]) -> Tensor:
    return torch.isin(labels, torch.tensor(classes))


def _renamed(labels: Tensor, classes: Sequence[int]) -> Tensor:
    """The classes to learn, counted from 0 in the order in which the plan names them."""
    return (labels[:, None] == torch.tensor(classes)).long().argmax(1)


def _digits(split: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    digits = load_digits()
    if split == "tuning":
        train_x, train_y, x, y = digits.train.x, digits.train.y, digits.validation.x, digits.validation.y
    else:
        train_x = torch.cat([digits.train.x, digits.validation.x])
        train_y = torch.cat([digits.train.y, digits.validation.y])
        x, y = digits.test.x, digits.test.y
    return (train_x - MEAN) / STD, train_y, (x - MEAN) / STD, y


def build_network(plan: Plan, data: StudyData) -> Network:
    _, channels, height, _width = data.images.shape
    if plan.network == "paper":
        if (height, channels) != (32, 3):
            raise bad("network", "paper", f"takes colour images of 32×32, not {plan.dataset}", "Use small")
        if plan.augment is not None:  # its kernels make no views
            return AnyNetwork(lambda: PaperCNN(classes=plan.outputs))
        return PaperNetwork(Layout(classes=plan.outputs))
    if plan.network == "compact":
        return AnyNetwork(lambda: CompactCNN(in_channels=channels, classes=plan.outputs))
    return AnyNetwork(lambda: SmallCNN(in_channels=channels, classes=plan.outputs, image_size=height))
