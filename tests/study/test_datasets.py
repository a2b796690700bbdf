"""What a study trains on and what it reports on: tuning never sees the test set."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from dpivon.data import MEAN, STD, DataSet, Images
from dpivon.stacked import PaperNetwork
from dpivon.study.plan import data as datasets
from dpivon.study.plan.plan import Plan, PlannedRun

CPU = torch.device("cpu")


def plan(split, dataset="cifar10"):
    return Plan("p", dataset, "small", split, 1, 1e-5, 1, 0, (PlannedRun("dp-sgd", 4, 1.0, 1.0, 0, 0.1),))


@pytest.fixture
def images(monkeypatch):
    """Forty training and ten test images, each of one colour of its own; the colour is also the label."""
    colours = np.arange(50, dtype=np.uint8)
    images = Images(np.broadcast_to(colours[:, None, None, None], (50, 8, 8, 3)).copy(), colours)
    found = DataSet("cifar10", images[np.arange(40)], images[np.arange(40, 50)], True)
    monkeypatch.setattr(datasets, "load_cifar10", lambda root: found)
    monkeypatch.setattr(datasets, "load_fashion_mnist", lambda root: found)


@pytest.mark.parametrize("dataset", ["cifar10", "fashion-mnist"])
def test_tuning_holds_out_training_images_and_final_runs_use_all(images, dataset):
    tuning = datasets.load_data(plan("tuning", dataset), Path(), CPU)
    train, held_out = set(tuning.labels.tolist()), set(tuning.eval_labels.tolist())
    assert (len(train), len(held_out)) == (36, 4)
    assert train | held_out == set(range(40))  # no test image anywhere
    final = datasets.load_data(plan("final", dataset), Path(), CPU)
    assert (final.labels.tolist(), final.eval_labels.tolist()) == (list(range(40)), list(range(40, 50)))
    for data in (tuning, final):
        for x, y in ((data.images, data.labels), (data.eval_images, data.eval_labels)):
            assert x.shape[1:] == (3, 8, 8)
            torch.testing.assert_close(x[:, 2, 5, 1], (y / 255 - MEAN) / STD)  # every image beside its own label


@pytest.mark.parametrize("dataset", ["cifar10", "fashion-mnist"])
def test_some_classes_are_learned_and_the_others_are_left_out(monkeypatch, dataset):
    """Of every class 5 training and 2 test images, whose colour is ten times the class."""
    labels = np.tile(np.arange(10, dtype=np.uint8), 7)
    images = Images(np.broadcast_to(10 * labels[:, None, None, None], (70, 8, 8, 3)).copy(), labels)
    found = DataSet(dataset, images[np.arange(50)], images[np.arange(50, 70)], True)
    for name in ("load_cifar10", "load_fashion_mnist"):
        monkeypatch.setattr(datasets, name, lambda root: found)
    monkeypatch.setattr(datasets, "TRAIN", 50)
    monkeypatch.setattr(datasets, "SIZES", {"train": 50})
    classes = (7, 0, 3)
    for split, sizes in (("final", (15, 6)), ("tuning", (14, 1))):
        some = dataclasses.replace(plan(split, dataset), classes=classes)
        data = datasets.load_data(some, Path(), CPU)
        assert (data.size, len(data.eval_labels)) == sizes
        assert data.size == datasets.train_size(dataset, split, classes)
        for x, y in ((data.images, data.labels), (data.eval_images, data.eval_labels)):
            colours = ((x[:, 0, 0, 0] * STD + MEAN) * 255).round()
            assert torch.equal(colours, 10.0 * torch.tensor(classes)[y])  # named in the plan's order
        assert datasets.build_network(some, data).model(torch.zeros(datasets.build_network(some, data).size))(
            data.images
        ).shape == (data.size, 3)
    assert datasets.train_size(dataset, "final", ()) == 50


def test_the_papers_network_for_fewer_classes():
    images = torch.zeros(2, 3, 32, 32)
    some = dataclasses.replace(plan("final"), network="paper", classes=(0, 1, 2, 3, 4, 5, 6, 7))
    network = datasets.build_network(some, datasets.StudyData(images, images, images, images))
    assert network.size == 357_258 - 2 * 129
    assert network.model(network.initial(0))(images).shape == (2, 8)
    grey = torch.zeros(2, 1, 16, 16)  # without its kernels, which are for 3 × 32 × 32
    other = datasets.build_network(some, datasets.StudyData(grey, grey, grey, grey))
    assert isinstance(network, PaperNetwork)
    assert not isinstance(other, PaperNetwork)
    assert other.model(other.initial(0))(grey).shape == (2, 8)


def test_digits_of_some_classes():
    some = dataclasses.replace(plan("final", "digits"), classes=(8, 9))
    data = datasets.load_data(some, Path(), CPU)
    assert data.size == datasets.train_size("digits", "final", (8, 9))
    assert set(data.labels.tolist()) == set(data.eval_labels.tolist()) == {0, 1}
    everything = datasets.load_data(plan("final", "digits"), Path(), CPU)
    assert len(data.eval_labels) == int((everything.eval_labels >= 8).sum())
    tuning = datasets.load_data(dataclasses.replace(some, split="tuning"), Path(), CPU)
    assert tuning.size == datasets.train_size("digits", "tuning", (8, 9))


def test_digits_are_split_the_same_way():
    tuning, final = (datasets.load_data(plan(split, "digits"), Path(), CPU) for split in ("tuning", "final"))
    assert (tuning.size, len(tuning.eval_labels), final.size, len(final.eval_labels)) == (1297, 200, 1497, 300)
    test = {x.numpy().tobytes() for x in final.eval_images}
    shown = {x.numpy().tobytes() for x in torch.cat([tuning.images, tuning.eval_images])}
    assert not test & shown
    assert shown == {x.numpy().tobytes() for x in final.images}
    assert datasets.build_network(plan("final", "digits"), final).size == 9354
