"""As much of torchvision as Opacus's tests import: no CPU build of the real one exists for our torch."""

from __future__ import annotations

import sys
import types

import torch
from torch import nn
from torch.utils.data import Dataset


class FakeData(Dataset):
    def __init__(self, size=1000, image_size=(3, 224, 224), num_classes=10, transform=None, **_):
        self.size, self.image_size, self.num_classes = size, image_size, num_classes
        self.transform = transform

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(self.image_size, generator=generator)
        label = int(torch.randint(self.num_classes, (1,), generator=generator))
        return (self.transform(image) if self.transform else image), label


class Compose:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, x):
        for step in self.steps:
            x = step(x)
        return x


class ToTensor:
    def __call__(self, x):
        return x


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = torch.tensor(mean), torch.tensor(std)

    def __call__(self, x):
        return (x - self.mean.view(-1, 1, 1)) / self.std.view(-1, 1, 1)


class _WithBatchNorm(nn.Module):
    """Stands in for ResNet and DenseNet: a convolutional net whose BatchNorm the validators must find and fix."""

    def __init__(self, **_):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(32, 10)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def install() -> None:
    torchvision, models, transforms, datasets = (
        types.ModuleType(name)
        for name in ("torchvision", "torchvision.models", "torchvision.transforms", "torchvision.datasets")
    )
    models.resnet18 = models.densenet121 = models.mobilenet_v3_small = _WithBatchNorm
    transforms.Compose, transforms.ToTensor, transforms.Normalize = Compose, ToTensor, Normalize
    datasets.FakeData = FakeData
    torchvision.models, torchvision.transforms, torchvision.datasets = models, transforms, datasets
    for module in (torchvision, models, transforms, datasets):
        sys.modules[module.__name__] = module
