"""A plan's data and network, on the device."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from dpivon.data import MEAN, STD, load_cifar10, load_digits, load_fashion_mnist, normalised
from dpivon.data.cifar10 import TRAIN
from dpivon.data.fashion_mnist import SIZES
from dpivon.data.images import SHARE, tuning_places
from dpivon.errors import bad
from dpivon.models import NETWORKS, network
from dpivon.privacy.kernels.paper.layout import Layout
from dpivon.stacked import AnyNetwork, Network, PaperNetwork
from dpivon.study.plan.plan import CLASSES, OwnData, Plan

#: Of an example of each built-in data set.
SHAPES = {"cifar10": (3, 32, 32), "fashion-mnist": (1, 28, 28), "digits": (1, 8, 8)}


@dataclass(frozen=True, eq=False)
class StudyData:
    """What a study trains on and what it reports on: the test set, or the held-out tenth when tuning."""

    images: Tensor  # [N, …], such as [N, channels, H, W] normalised by public constants
    labels: Tensor
    eval_images: Tensor
    eval_labels: Tensor

    @property
    def size(self) -> int:
        return len(self.labels)


def load_data(plan: Plan, root: Path, device: torch.device) -> StudyData:
    x, y, test_x, test_y = _examples(plan, root)
    learned, shown = (_among(labels, plan.classes) for labels in (y, test_y))
    places = learned.nonzero().flatten()
    if plan.split == "tuning":
        kept, held_out = _tuning(plan, places)
        parts = x[kept], y[kept], x[held_out], y[held_out]
    else:
        parts = x[places], y[places], test_x[shown], test_y[shown]
    train_x, train_y, eval_x, eval_y = parts
    if plan.classes:
        train_y, eval_y = (_renamed(labels, plan.classes) for labels in (train_y, eval_y))
    return StudyData(*(t.to(device) for t in (train_x, train_y, eval_x, eval_y)))


def train_size(dataset: str, split: str, classes: Sequence[int], own: OwnData | None = None) -> int:
    """The public number of training examples, before the data are there: σ is calibrated to it."""
    if dataset == "digits":
        digits = load_digits()
        parts = [digits.train.y] if split == "tuning" else [digits.train.y, digits.validation.y]
        return sum(int(_among(labels, classes).sum()) for labels in parts)
    if own is not None:
        whole = own.examples
    else:
        whole = (TRAIN if dataset == "cifar10" else SIZES["train"]) * (len(classes) or CLASSES) // CLASSES
    return whole if split == "final" else whole - whole // SHARE


def _examples(plan: Plan, root: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All training examples, and the test set: inputs and labels each."""
    if plan.data is not None:
        from dpivon.study.plan.config import load_own  # needs pydantic

        return load_own(plan.data, root)
    if plan.dataset == "digits":
        d = load_digits()
        x, y = torch.cat([d.train.x, d.validation.x]), torch.cat([d.train.y, d.validation.y])
        return (x - MEAN) / STD, y, (d.test.x - MEAN) / STD, d.test.y
    data = (load_cifar10 if plan.dataset == "cifar10" else load_fashion_mnist)(root)
    return *normalised(data.train), *normalised(data.test)


def _tuning(plan: Plan, places: Tensor) -> tuple[Tensor, Tensor]:
    """Which of these training examples a tuning study trains on, and which it reports on."""
    if plan.dataset == "digits":  # they come with a validation set, which stands last
        first = len(load_digits().train)
        return places[places < first], places[places >= first]
    kept, held_out = tuning_places(len(places))
    return places[kept], places[held_out]


def _among(labels: Tensor, classes: Sequence[int]) -> Tensor:
    return torch.isin(labels, torch.tensor(classes)) if classes else torch.ones_like(labels, dtype=torch.bool)


def _renamed(labels: Tensor, classes: Sequence[int]) -> Tensor:
    """The classes to learn, counted from 0 in the order in which the plan names them."""
    return (labels[:, None] == torch.tensor(classes)).long().argmax(1)


def build_network(plan: Plan, data: StudyData) -> Network:
    """The plan's network for examples as these are; only their shape and type are used."""
    shape = tuple(data.images.shape[1:])
    if plan.network == "paper" and shape == (3, 32, 32) and plan.augment is None and not plan.arguments:
        return PaperNetwork(Layout(classes=plan.outputs))  # kernels, which make no views
    made = AnyNetwork(partial(network, plan.network, shape=shape, classes=plan.outputs, **plan.arguments))
    if plan.architecture and _architecture(made.template()) != plan.architecture:
        fix = "Restore its code, or resolve the study again and give another --out"
        raise bad("network", plan.network, "is not what the study was planned with", fix)
    try:
        with torch.no_grad():
            outputs = tuple(made.template().eval()(torch.zeros(2, *shape, dtype=data.images.dtype)).shape)
    except Exception as error:  # whatever a network raises
        problem = f"cannot take examples of shape {shape} and type {data.images.dtype} ({error})"
        raise bad("network", plan.network, problem, "Choose a network for such examples") from error
    if outputs != (2, plan.outputs):
        problem = f"returns {outputs} for two examples of {plan.outputs} classes"
        raise bad("network", plan.network, problem, f"Let it return (2, {plan.outputs}), one logit per class")
    return made


def architecture(plan: Plan) -> str:
    """A digest of a network that is named by its import path, whose code may change; nothing for a built-in one."""
    if plan.network in NETWORKS:
        return ""
    shape = SHAPES[plan.dataset] if plan.data is None else plan.data.shape
    return _architecture(network(plan.network, shape=shape, classes=plan.outputs, **plan.arguments))


def _architecture(model: nn.Module) -> str:
    layers = [(name, type(layer).__name__) for name, layer in model.named_modules()]
    sizes = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    return hashlib.sha256(repr((layers, sizes)).encode()).hexdigest()[:16]
