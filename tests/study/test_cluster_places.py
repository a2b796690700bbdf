"""What the Ray engine makes of a cluster, without one: how many stacks, of how many runs, on what; and other versions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_study import PLAN

from dpivon.errors import ArgumentError
from dpivon.study.cluster.attempt import Task, attempt
from dpivon.study.cluster.engine import _places, _stack_size
from dpivon.study.plan.plan import Plan, PlannedRun
from dpivon.study.results import table
from dpivon.study.run.settings import Cluster, Settings

MANY = Plan(**{**vars(PLAN), "runs": tuple(PlannedRun("dp-sgd", 64, 1.0, 1.0, seed, 0.5) for seed in range(270))})


def cluster_of(**resources):
    return SimpleNamespace(cluster_resources=lambda: resources)


@pytest.mark.parametrize(
    ("resources", "device", "options", "found"),
    [
        ({"CPU": 16.0}, None, {}, ("cpu", 16)),
        ({"CPU": 16.0, "GPU": 8.0}, None, {}, ("cuda", 8)),
        ({"CPU": 16.0, "GPU": 8.0}, None, {"gpus_per_stack": 0.5}, ("cuda", 16)),
        (
            {"CPU": 16.0, "GPU": 8.0},
            None,
            {"gpus_per_stack": 0.4},
            ("cuda", 16),
        ),  # what is left of a GPU holds no third
        ({"CPU": 16.0, "GPU": 8.0}, "cpu", {}, ("cpu", 16)),
        ({"CPU": 16.0, "GPU": 8.0}, None, {"workers": 3}, ("cuda", 3)),
    ],
)
def test_one_kind_of_device_and_what_it_holds(resources, device, options, found):
    assert _places(cluster_of(**resources), Settings(device=device), Cluster(**options)) == found


def test_no_fewer_stacks_than_gpus_and_none_too_large(tmp_path):
    def size(workers, device="cuda", **settings):
        return _stack_size(MANY, tmp_path, Settings(**settings), device, workers)

    assert [size(w) for w in (1, 3, 8, 64, 1000)] == [90, 90, 34, 5, 1]
    assert size(8, stack=20) == 20
    assert (size(8, "cpu"), size(8, "cpu", stack=4)) == (1, 4)
    table.write(tmp_path / "runs.csv", [{"id": run.id} for run in MANY.runs[:190]])
    assert size(8) == 10  # of what is left


def test_a_node_with_another_version_is_refused_by_name():
    task = Task(PLAN, PLAN.runs[:1], "0000", 1, "title", Path("nowhere"), "", Settings(), "cpu", None, "0.0.0")
    ended = attempt(task, (), None)
    assert ended.hopeless
    assert not ended.finished
    assert "is not the driver's, which is 0.0.0. Install the same dpivon on" in ended.error


def test_a_gpu_that_is_asked_for_must_be_there():
    with pytest.raises(ArgumentError, match="the cluster has no GPU"):
        _places(cluster_of(CPU=2.0), Settings(device="cuda"), Cluster())
