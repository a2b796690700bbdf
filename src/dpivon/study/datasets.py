"""A plan's data and network, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dpivon.data import MEAN, STD, load_cifar10, load_fashion_mnist, normalised, tuning_split
from dpivon.errors import bad
from dpivon.models.cnn import SmallCNN
from dpivon.stacked import AnyNetwork, Network, PaperNetwork
from dpivon.study.plan import Plan


@dataclass(frozen=True, eq=False)
class StudyData:
    """What a study trains on and what it reports on: the test set, or the held-out tenth when tuning."""

    images: Tensor  # [N, channels, H, W], normalised by public constants
    labels: Tensor
    eval_images: Tensor
    eval_labels: Tensor

    @property
    def size(self) -> int:
        return len(self.labels)


def load_data(plan: Plan, root: Path, device: torch.device) -> StudyData:
    if plan.dataset == "digits":
        tensors = _digits(plan.split)
    else:
        data = (load_cifar10 if plan.dataset == "cifar10" else load_fashion_mnist)(root)
        train, held_out = (data.train, data.test) if plan.split == "final" else tuning_split(data.train)
        tensors = (*normalised(train), *normalised(held_out))
    return StudyData(*(t.to(device) for t in tensors))


def _digits(split: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from dpivon.demo.data import load_digits

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
            raise bad("network", "paper", f"takes colour pictures of 32×32, not {plan.dataset}", "Use small")
        return PaperNetwork()
    return AnyNetwork(lambda: SmallCNN(in_channels=channels, image_size=height))
