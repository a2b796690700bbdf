"""Studies on a real Ray cluster on this machine: workers die, runs fail, and the table is the local engine's."""

from __future__ import annotations

import math
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import clusters
import pytest
import torch
from clusters import LONG, at_step, killed_when_it_has_delivered, strikes_the_first, waits_for
from tiny_study import PLAN, UNLIKE
from typer.testing import CliRunner

from dpivon.cli import app
from dpivon.durable.files import Lock
from dpivon.durable.ledger import read
from dpivon.errors import ArgumentError, DpivonError
from dpivon.privacy.accounting import Accountant
from dpivon.privacy.temperature import HALVINGS, temperature_releases
from dpivon.study.cluster import engine
from dpivon.study.plan.data import architecture
from dpivon.study.results import table
from dpivon.study.results.folder import status_lines
from dpivon.study.run.runner import run_study, run_with
from dpivon.study.run.settings import Cluster, Settings

FAST = Settings(quiet=True, block=4, device="cpu", checkpoint_seconds=0.2)
TWO = Cluster(workers=2)


@pytest.fixture(scope="module")
def cluster():
    """Two places for stacks, a small object store, no dashboard; the engine uses what is connected."""
    pytest.importorskip("ray")
    from dpivon.study.cluster.engine import connected

    with connected(Cluster(workers=2), 0) as ray:
        ray.cloudpickle.register_pickle_by_value(clusters)  # workers do not find the tests
        yield ray


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    out = tmp_path_factory.mktemp("local")
    torch.set_num_threads(1)
    assert run_study(LONG, out, FAST).finished == 3
    return {row["id"]: row for row in table.read(out / "runs.csv")}


def same(row, other):
    return {k: v for k, v in row.items() if k not in UNLIKE} == {k: v for k, v in other.items() if k not in UNLIKE}


def rows_of(out):
    rows = table.read(out / "runs.csv")
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows)  # no run stands twice
    return found


@pytest.fixture
def signalled(monkeypatch, tmp_path):
    """Sends a signal to the worker that has made 20 releases; gives a function that says how many were charged by then."""

    def plant(number):
        note = tmp_path / "signalled"
        monkeypatch.setattr(engine, "attempt", at_step(20, strikes_the_first(number, note)))
        return lambda: int(note.read_text())

    return plant


@pytest.mark.slow
def test_a_killed_worker_changes_nothing_where_the_folder_is_seen(cluster, local, tmp_path, signalled):
    out, charged = tmp_path / "out", signalled(signal.SIGKILL)
    outcome = run_with("ray", LONG, out, FAST, TWO)
    assert charged() >= 20
    assert (outcome.finished, outcome.exit_code) == (3, 0)
    rows = rows_of(out)
    assert rows.keys() == local.keys()
    for name, row in rows.items():
        assert same(row, local[name])  # to the bit: scores, diagnostics' last values, steps
        assert (row["epsilon"], row["releases"]) == (local[name]["epsilon"], local[name]["releases"])
    points = [(d["id"], d["step"]) for d in table.read(out / "diagnostics.csv")]
    assert len(points) == len(set(points)) > 10
    assert not list((out / "stacks").iterdir())
    assert len(list((out / "ledgers").iterdir())) == 3
    assert not (out / ".cluster").exists()


@pytest.mark.slow
def test_what_was_lost_with_a_worker_of_its_own_disk_stays_charged(cluster, local, tmp_path, signalled):
    out, scratch, charged = tmp_path / "out", tmp_path / "scratch", signalled(signal.SIGKILL)
    outcome = run_with("ray", LONG, out, FAST, Cluster(workers=2, scratch=scratch))
    assert charged() >= 20
    assert outcome.finished == 3
    rows = rows_of(out)
    dearer = [row for row in rows.values() if row["releases"] > row["steps"]]
    assert len(dearer) == 1
    for name, row in rows.items():
        account = Accountant("rdp")
        account.charge(
            noise_multiplier=row["noise_multiplier"], sample_rate=row["batch_size"] / 1497, steps=row["releases"]
        )
        assert row["epsilon"] == account.get_epsilon(1e-4)
        assert row["steps"] == local[name]["steps"]
        if row is dearer[0]:  # batches and noise are new behind what was lost
            assert row["epsilon"] > local[name]["epsilon"]
            assert row["nll"] != local[name]["nll"]
        else:
            assert same(row, local[name])
            assert row["epsilon"] == local[name]["epsilon"]
    kept = {read(folder / "ledger.jsonl").releases for folder in (out / "ledgers").iterdir()}
    assert kept == {row["releases"] for row in rows.values()}


@pytest.mark.slow
def test_a_worker_that_hangs_is_ended_and_its_stack_begun_again(cluster, local, tmp_path, signalled):
    out, charged = tmp_path / "out", signalled(signal.SIGSTOP)
    outcome = run_with("ray", LONG, out, FAST, Cluster(workers=2, hung_after=6.0))
    assert charged() >= 20
    assert (outcome.finished, outcome.exit_code, outcome.failed) == (3, 0, {})
    rows = rows_of(out)
    assert all(same(row, local[name]) and row["epsilon"] == local[name]["epsilon"] for name, row in rows.items())


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_rows_that_a_killed_worker_has_delivered_are_not_made_again(cluster, tmp_path, monkeypatch, shared):
    """In an evaluation with temperatures: whoever keeps the questions with the worker's disk pays for them again."""
    plan = replace(LONG, runs=LONG.runs[:2], epochs=1, temperature_noise=5.0)
    fast, out = Settings(quiet=True, block=8, device="cpu", stack=2, checkpoint_seconds=1e-9), tmp_path / "out"
    run_study(plan, tmp_path / "local", fast)
    local = rows_of(tmp_path / "local")
    monkeypatch.setattr(engine, "attempt", killed_when_it_has_delivered(out / "runs.csv"))
    options = Cluster(workers=1, scratch=None if shared else tmp_path / "scratch")
    assert run_with("ray", plan, out, fast, options).exit_code == 0
    rows = rows_of(out)
    assert rows.keys() == local.keys()
    first, second = (rows[run.id] for run in plan.runs)
    assert same(first, local[first["id"]])
    assert all(row["epsilon"] == local[row["id"]]["epsilon"] for row in (first, second))
    (ledger,) = (out / "ledgers").glob("*/ledger.jsonl")
    assert temperature_releases(read(ledger)) == (HALVINGS if shared else 2 * HALVINGS)
    if shared:
        assert same(second, local[second["id"]])
    else:
        assert second["epsilon_tempered"] > local[second["id"]]["epsilon_tempered"]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_stopping_in_time_costs_nothing_wherever_the_stack_is_kept(cluster, local, tmp_path, monkeypatch, shared):
    out, options = tmp_path / "out", Cluster(workers=2, scratch=None if shared else tmp_path / "scratch")
    brief = Settings(quiet=True, block=4, device="cpu", checkpoint_seconds=1e-9, minutes=1e-9)
    stop, said = engine._Driver._stop, tmp_path / "said"
    with monkeypatch.context() as patch:  # a worker reports once; with 8 releases it waits until all are told to stop
        patch.setattr(engine, "attempt", at_step(8, waits_for(said), report_every=math.inf))
        patch.setattr(engine._Driver, "_stop", lambda driver: (stop(driver), said.touch()))
        assert run_with("ray", LONG, out, brief, options).exit_code == 75
    told = "\n".join(status_lines(out))
    assert told.startswith("long: 0 of 3 runs finished")
    # After the 4 releases of the first report, or the 8, there is at most one block more, or what of it precedes a probe.
    assert 4 < max(int(n) for n in re.findall(r"(\d+) releases charged", told)) <= 12
    assert run_with("ray", LONG, out, FAST, options).exit_code == 0
    for name, row in rows_of(out).items():
        assert same(row, local[name])
        assert row["releases"] == row["steps"]
        assert row["epsilon"] == local[name]["epsilon"]


@pytest.mark.slow
def test_the_loss_of_the_desk_is_told_and_the_same_command_goes_on(cluster, local, tmp_path, monkeypatch):
    show = engine._Driver._show

    def losing(self, stacks):
        show(self, stacks)
        if self.moved:
            self.ray.kill(self.desk)

    with monkeypatch.context() as patch:
        patch.setattr(engine._Driver, "_show", losing)
        with pytest.raises(DpivonError, match="The same command goes on"):
            run_with("ray", LONG, tmp_path, FAST, TWO)
    assert run_with("ray", LONG, tmp_path, FAST, TWO).exit_code == 0
    rows = rows_of(tmp_path)
    assert all(same(row, local[name]) for name, row in rows.items())


@pytest.mark.slow
def test_a_run_that_fails_is_tried_again_then_named_and_the_others_finish(cluster, tmp_path):
    bad = PLAN.runs[1]
    folder = tmp_path / "stacks" / "0000"
    folder.mkdir(parents=True)
    (folder / "runs.json").write_text(f'["{bad.id}"]')
    lock = Lock(folder / "ledger.jsonl.lock", "the test")
    outcome = run_with("ray", PLAN, tmp_path, FAST, Cluster(workers=2, retries=1))
    assert (outcome.finished, outcome.exit_code) == (2, 1)
    assert list(outcome.failed) == [bad.id]
    assert "another process is using it" in outcome.failed[bad.id]
    assert "in attempt 2" in outcome.failed[bad.id]
    lines = outcome.lines(tmp_path / "runs.csv")
    assert lines[0].startswith(f"given up: {bad.id}: DpivonError")
    assert lines[-1].startswith("2 of 3 runs finished")
    before = rows_of(tmp_path)
    assert bad.id not in before
    lock.release()
    assert run_with("ray", PLAN, tmp_path, FAST, TWO).exit_code == 0
    after = rows_of(tmp_path)
    assert len(after) == 3
    assert all(after[name] == row for name, row in before.items())  # not trained again: even the seconds are the same


@pytest.mark.slow
def test_a_run_that_can_never_work_is_not_tried_twice(cluster, tmp_path):
    outcome = run_with("ray", PLAN, tmp_path, Settings(quiet=True, device="cpu", precision="int8"), TWO)
    assert outcome.finished == 0
    assert len(outcome.failed) == 3
    assert all("precision='int8'" in reason and "attempt 1" in reason for reason in outcome.failed.values())


@pytest.mark.slow
def test_the_command_of_the_readme_with_progress_and_posteriors(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("study.yaml").write_text(
        "name: reduced\ndataset: digits\nnetwork: small\nepochs: 1\nseeds: 1\ndelta: 1.0e-4\nmc_samples: 2\n"
        "grid: {batch_size: [128], noise_multiplier: [1, 4], max_grad_norm: [1]}\n"
        "methods:\n  - {method: dp-sgd, lr: 0.05}\n"
    )
    done = CliRunner().invoke(app, ["study", "run", "--engine", "ray", "study.yaml", "--device", "cpu", "--keep"])
    assert done.exit_code == 0, done.output
    assert "2 of 2 runs finished, in study-output/reduced/runs.csv" in done.output
    assert "reduced 1/2: 1×b128: finished (" in done.stderr
    out = Path("study-output/reduced")
    assert status_lines(out)[0] == "reduced: 2 of 2 runs finished"
    assert {p.stem for p in (out / "posteriors").iterdir()} == set(rows_of(out))
    again = CliRunner().invoke(app, ["study", "run", str(out / "study.json"), "--out", str(out)])  # the local engine
    assert again.exit_code == 0


def test_without_ray_the_extra_is_named_and_the_local_engine_needs_none(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DpivonError, match=r"pip install 'dpivon\[ray\]'"):
        run_with("ray", PLAN, tmp_path / "a", FAST, Cluster())
    part = Settings(quiet=True, block=4, device="cpu", only="-b128-")
    assert run_with("local", PLAN, tmp_path / "b", part, Cluster()).finished == 1


@pytest.mark.parametrize(
    ("engine", "options", "words"),
    [
        ("local", {"workers": 2}, "workers=2: requires --engine ray"),
        ("local", {"scratch": Path("s")}, "scratch="),
        ("ray", {"workers": 0}, "workers=0"),
        ("ray", {"retries": -1}, "retries=-1"),
        ("ray", {"gpus_per_stack": 1.5}, "gpus_per_stack=1.5.*it never uses two"),
        ("ray", {"address": "ray://10.0.0.1:10001"}, "address='ray://10.0.0.1:10001'.*on a node of the cluster"),
        ("slurm", {}, "engine='slurm'"),
    ],
)
def test_bad_options_are_named(tmp_path, engine, options, words):
    with pytest.raises(ArgumentError, match=words):
        run_with(engine, PLAN, tmp_path, FAST, Cluster(**options))


def test_a_gpu_that_the_cluster_lacks_is_named(cluster, tmp_path):
    with pytest.raises(ArgumentError, match=r"device='cuda': the cluster has no GPU"):
        run_with("ray", PLAN, tmp_path, Settings(quiet=True, device="cuda"), TWO)


@pytest.mark.slow
def test_networks_by_import_path_are_found_where_the_driver_finds_them(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_on_ray.py").write_text(
        "from torch import nn\n\ndef net(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    plan = replace(PLAN, network="own_on_ray:net", runs=PLAN.runs[:1])
    plan = replace(plan, architecture=architecture(plan))
    try:
        assert run_with("ray", plan, tmp_path / "out", FAST, TWO).finished == 1
        gone = run_with("ray", replace(plan, network="own_on_ray:gone"), tmp_path / "gone", FAST, TWO)
        (why,) = gone.failed.values()
        assert "network='own_on_ray:gone': could not be imported" in why
    finally:
        sys.modules.pop("own_on_ray", None)
