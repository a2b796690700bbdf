"""Views and CompactCNN in a study, from images like CIFAR-10's to the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.paper.hooks import run_hooks

from dpivon import ArgumentError, Augmentation, budget, temperature_cost
from dpivon.data import DataSet, Images
from dpivon.models import CompactCNN, PaperCNN
from dpivon.stacked import AnyNetwork, PaperNetwork
from dpivon.study.plan import data as datasets
from dpivon.study.plan.plan import Plan, PlannedRun
from dpivon.study.results import table
from dpivon.study.run.runner import run_study
from dpivon.study.run.settings import Settings

TWO = Augmentation(2, flip=True, crop=4)
PLAN = Plan(
    name="views",
    dataset="cifar10",
    network="compact",
    split="final",
    epochs=1,
    delta=1e-3,
    mc_samples=2,
    seed=0,
    runs=(PlannedRun("dp-sgd", 12, 1.0, 1.0, 0, 0.1, {"ema": 0.5}), PlannedRun("dp-steady", 12, 1.0, 1.0, 0, 5.0)),
    temperature_noise=5.0,
    augment=TWO,
)
FAST = Settings(quiet=True, block=1, device="cpu", stack=2)


@pytest.fixture
def images(monkeypatch):
    rng = np.random.default_rng(0)
    made = [
        Images(rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, n, dtype=np.uint8))
        for n in (24, 10)
    ]
    monkeypatch.setattr(datasets, "load_cifar10", lambda root: DataSet("cifar10", *made, True))


@pytest.mark.slow
def test_a_study_of_views_from_images_to_the_table(images, tmp_path):
    """Two steps a run, stopped after the first and resumed; without views the same steps end elsewhere."""
    torch.set_num_threads(1)
    outs = [tmp_path / name for name in ("whole", "stopped", "plain")]
    assert run_study(PLAN, outs[0], FAST).finished == 2
    assert run_study(PLAN, outs[1], replace(FAST, minutes=1e-9)).finished == 0
    assert run_study(PLAN, outs[1], FAST).finished == 2
    run_study(replace(PLAN, augment=None), outs[2], FAST)
    whole, stopped, plain = ({r["method"]: r for r in table.read(out / "runs.csv")} for out in outs)
    for method, row in whole.items():
        assert json.loads(row["augment"]) == {"views": 2, "flip": True, "crop": 4, "padding": "reflect"}
        assert row["network"] == "compact"
        assert row["releases"] == row["steps"] == 2
        cost = {"dataset_size": 24, "batch_size": 12, "epochs": 1, "delta": 1e-3, "noise_multiplier": 1.0}
        cost |= {"accountant": "rdp"}
        assert row["epsilon"] == budget(**cost).epsilon == plain[method]["epsilon"]  # views cost nothing
        assert row["epsilon_tempered"] == pytest.approx(budget(**cost, also=[temperature_cost(5.0)]).epsilon)
        assert row["nll"] > 0
        assert {k: v for k, v in row.items() if k != "seconds"} == {
            k: v for k, v in stopped[method].items() if k != "seconds"
        }
        assert plain[method]["augment"] == ""
        assert plain[method]["nll"] != row["nll"]


def test_networks_of_a_plan_with_views(images, tmp_path):
    data = datasets.load_data(PLAN, Path(), torch.device("cpu"))
    assert isinstance(datasets.build_network(PLAN, data).template(), CompactCNN)
    paper = replace(PLAN, network="paper")
    assert type(datasets.build_network(paper, data)) is AnyNetwork
    assert isinstance(datasets.build_network(paper, data).template(), PaperCNN)
    assert isinstance(datasets.build_network(replace(paper, augment=None), data), PaperNetwork)
    with pytest.raises(ArgumentError, match=r"augment=.*ordinary loop"):
        run_hooks(PLAN, tmp_path, FAST)
