"""The ordinary loop beside the stacks: the same plan, the same ε, and a page that sees a difference."""

from __future__ import annotations

import math

import pytest
import torch
from experiments.paper import hooks
from experiments.paper.check import check_page, distance
from experiments.paper.hooks import run_hooks

from dpivon import IVON as Optimizer
from dpivon.study.plan.plan import Plan, PlannedRun
from dpivon.study.results import table
from dpivon.study.results.table import Value
from dpivon.study.run.runner import run_study
from dpivon.study.run.settings import Settings
from study.tables import IVON, rows

PLAN = Plan(
    name="tiny",
    dataset="digits",
    network="small",
    split="final",
    epochs=1,
    delta=1e-4,
    mc_samples=2,
    seed=0,
    runs=(PlannedRun("dp-adam", 256, 1.0, 1.0, 0, 0.01), PlannedRun(IVON, 256, 1.0, 1.0, 0, 0.5, {"hess_init": 0.7})),
)


def test_both_ways_make_the_same_releases(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    made = []
    make = hooks.make
    monkeypatch.setattr(hooks, "make", lambda *a, **k: made.append(make(*a, **k)) or made[-1])
    settings = Settings(quiet=True, device="cpu")
    assert run_hooks(PLAN, tmp_path, settings).finished == 2
    run_study(PLAN, tmp_path, settings)
    ours, theirs = ({r["id"]: r for r in table.read(tmp_path / name)} for name in ("runs.csv", "hooks.csv"))
    assert ours.keys() == theirs.keys()
    for name, row in ours.items():
        for key in ("epsilon", "steps", "releases", "train_size", "lr", "options", "epochs", "method"):
            assert theirs[name][key] == row[key], key
        assert theirs[name]["nll"] != row["nll"]  # other batches, other noise
        assert (theirs[name]["mc_nll"] is None) == (row["mc_nll"] is None)
    optimizer = made[1].optimizer
    assert isinstance(optimizer, Optimizer)
    group = optimizer.param_groups[0]
    assert (group["rescale_lr"], group["hess_init"], group["ess"]) == (False, 0.7, 1497)
    monkeypatch.setattr(hooks, "_row", lambda *a: pytest.fail("ran again"))
    assert run_hooks(PLAN, tmp_path, settings).finished == 2


def test_distance_is_in_standard_errors():
    assert distance(Value(1.0, 0.3, 9), Value(1.5, 0.4, 16)) == pytest.approx(0.5 / math.hypot(0.1, 0.1))
    assert distance(Value(1.0, 0.0, 1), Value(1.0, 0.0, 1)) == 0
    assert distance(Value(1.0, 0.0, 1), Value(1.1, 0.0, 1)) == math.inf


def test_the_page_sees_a_difference():
    stacked, _ = rows()
    same = check_page(stacked, [r | {"seconds": 10 * r["seconds"]} for r in stacked])
    assert "0 of 360 comparisons" in same
    assert "A run took 10.0 times as long" in same
    shifted = [r | {"accuracy": r["accuracy"] - (0.1 if r["method"] == IVON else 0)} for r in stacked]
    assert "30 of 360 comparisons" in check_page(stacked, shifted)
