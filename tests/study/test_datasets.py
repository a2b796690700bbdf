"""What a study trains on and what it reports on: tuning never sees the test set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dpivon.data import MEAN, STD, DataSet, Images
from dpivon.study import datasets
from dpivon.study.plan import Plan, PlannedRun

CPU = torch.device("cpu")


def plan(split, dataset="cifar10"):
    return Plan("p", dataset, "small", split, 1, 1e-5, 1, 0, (PlannedRun("dp-sgd", 4, 1.0, 1.0, 0, 0.1),))


@pytest.fixture
def pictures(monkeypatch):
    """Forty training and ten test pictures, each of one colour of its own; the colour is also the label."""
    colours = np.arange(50, dtype=np.uint8)
    images = Images(np.broadcast_to(colours[:, None, None, None], (50, 8, 8, 3)).copy(), colours)
    found = DataSet("cifar10", images[np.arange(40)], images[np.arange(40, 50)], True)
    monkeypatch.setattr(datasets, "load_cifar10", lambda root: found)
    monkeypatch.setattr(datasets, "load_fashion_mnist", lambda root: found)


@pytest.mark.parametrize("dataset", ["cifar10", "fashion-mnist"])
def test_tuning_holds_out_training_pictures_and_final_runs_use_all(pictures, dataset):
    tuning = datasets.load_data(plan("tuning", dataset), Path(), CPU)
    train, held_out = set(tuning.labels.tolist()), set(tuning.eval_labels.tolist())
    assert (len(train), len(held_out)) == (36, 4)
    assert train | held_out == set(range(40))  # no test picture anywhere
    final = datasets.load_data(plan("final", dataset), Path(), CPU)
    assert (final.labels.tolist(), final.eval_labels.tolist()) == (list(range(40)), list(range(40, 50)))
    for data in (tuning, final):
        for x, y in ((data.images, data.labels), (data.eval_images, data.eval_labels)):
            assert x.shape[1:] == (3, 8, 8)
            torch.testing.assert_close(x[:, 2, 5, 1], (y / 255 - MEAN) / STD)  # every picture beside its own label


def test_digits_are_split_the_same_way():
    tuning, final = (datasets.load_data(plan(split, "digits"), Path(), CPU) for split in ("tuning", "final"))
    assert (tuning.size, len(tuning.eval_labels), final.size, len(final.eval_labels)) == (1297, 200, 1497, 300)
    test = {x.numpy().tobytes() for x in final.eval_images}
    shown = {x.numpy().tobytes() for x in torch.cat([tuning.images, tuning.eval_images])}
    assert not test & shown
    assert shown == {x.numpy().tobytes() for x in final.images}
    assert datasets.build_network(plan("final", "digits"), final).size == 9354
