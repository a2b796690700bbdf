"""A tiny study end to end: stopped, killed and resumed, it gives the table of one that was never disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_study import BARE, FAST, PLAN, STEPS, compare
from typer.testing import CliRunner

from dpivon import budget, temperature_cost
from dpivon.cli import app
from dpivon.durable.ledger import read
from dpivon.errors import ArgumentError, DpivonError
from dpivon.stacked import Stack
from dpivon.study.plan.plan import Plan, PlannedRun, noise_seed
from dpivon.study.results import table
from dpivon.study.results.folder import group, status_lines
from dpivon.study.run.runner import run_study
from dpivon.study.run.settings import Settings
from dpivon.study.run.work import points


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    torch.set_num_threads(1)
    assert run_study(PLAN, out, FAST).finished == 3
    return out


def test_a_row_a_run_with_its_own_epsilon(undisturbed):
    rows = {r["method"]: r for r in table.read(undisturbed / "runs.csv")}
    assert len(rows) == 3
    for row in rows.values():
        expected = budget(
            dataset_size=1497,
            batch_size=row["batch_size"],
            epochs=1,
            delta=1e-4,
            noise_multiplier=row["noise_multiplier"],
            accountant="rdp",
        )
        assert row["epsilon"] == expected.epsilon
        assert row["releases"] == row["steps"] == expected.steps
        assert row["epsilon_pld"] is None  # for `report` to fill in
        assert 0.1 < row["accuracy"] <= 1
    assert rows["dp-ivon-gradsq"]["mc_samples"] == 2
    assert rows["dp-ivon-gradsq"]["mc_nll"] != rows["dp-ivon-gradsq"]["nll"]
    assert rows["dp-sgd"]["mc_nll"] is None
    diagnostics = table.read(undisturbed / "diagnostics.csv")
    assert [d["step"] for d in diagnostics] == points(STEPS)
    assert {d["id"] for d in diagnostics} == {rows["dp-ivon-gradsq"]["id"]}
    assert not list((undisturbed / "stacks").iterdir())
    assert status_lines(undisturbed)[0] == "tiny: 3 of 3 runs finished"


def test_runs_of_one_repetition_begin_at_the_same_weights_and_share_no_noise(tmp_path, monkeypatch):
    seen = []

    class Seen(Stack):
        def __init__(self, runs, *args, **kwargs):
            super().__init__(runs, *args, **kwargs)
            seen.extend((self.runs[i], row.clone()) for i, row in enumerate(self.mean))
            raise KeyboardInterrupt

    monkeypatch.setattr("dpivon.study.run.work.Stack", Seen)
    first = PLAN.runs[0]
    runs = (first, replace(first, method="dp-adam"), replace(first, noise_multiplier=3.0), replace(first, seed=1))
    with pytest.raises(KeyboardInterrupt):
        run_study(replace(PLAN, runs=runs), tmp_path / "out", replace(FAST, stack=4))
    same = [row for run, row in seen if run.seed != noise_seed(PLAN, runs[3])]
    other = [row for run, row in seen if run.seed == noise_seed(PLAN, runs[3])]
    assert len(same) == 3
    assert all(torch.equal(row, same[0]) for row in same)
    assert not torch.equal(other[0], same[0])
    assert len({run.seed for run, _ in seen}) == 4


def test_what_is_finished_is_not_repeated(undisturbed, monkeypatch):
    before = (undisturbed / "runs.csv").read_bytes()
    monkeypatch.setattr(Stack, "train", lambda *a: pytest.fail("trained again"))
    assert run_study(PLAN, undisturbed, FAST).finished == 3
    assert (undisturbed / "runs.csv").read_bytes() == before


def test_stacking_gives_the_same_table(undisturbed, tmp_path):
    run_study(PLAN, tmp_path, Settings(quiet=True, block=4, device="cpu", stack=2))
    ours, theirs = ({r["id"]: r for r in table.read(o / "runs.csv")} for o in (tmp_path, undisturbed))
    assert {r["stack_size"] for r in ours.values()} == {1, 2}
    for name, row in ours.items():
        assert row["accuracy"] == pytest.approx(theirs[name]["accuracy"], abs=0.01)
        assert row["epsilon"] == theirs[name]["epsilon"]


def test_stopping_in_time_costs_nothing(undisturbed, tmp_path):
    outcomes = [run_study(PLAN, tmp_path, Settings(quiet=True, block=4, device="cpu", minutes=1e-9)) for _ in range(2)]
    assert [o.finished for o in outcomes] == [0, 0]
    assert "under way: stack 0000, 1 runs, 8 releases charged" in "\n".join(status_lines(tmp_path))
    assert run_study(PLAN, tmp_path, FAST).finished == 3
    compare(tmp_path, undisturbed, exact=True)


def test_an_interrupt_stops_at_a_block_and_costs_nothing(undisturbed, tmp_path, monkeypatch):
    train, calls = Stack.train, []

    def interrupting(self, steps):
        for done in train(self, steps):
            calls.append(done)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield done

    monkeypatch.setattr(Stack, "train", interrupting)
    assert run_study(PLAN, tmp_path, FAST).finished == 0
    assert calls == [4, 8]
    assert run_study(PLAN, tmp_path, FAST).finished == 3
    compare(tmp_path, undisturbed, exact=True)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("at", [1, 3, 6, 9, 12])
def test_a_crash_anywhere_changes_nothing(undisturbed, tmp_path, monkeypatch, at):
    launch, calls = Stack._launch, []

    def failing(self):
        calls.append(1)
        if len(calls) == 3 * at:
            raise RuntimeError("the machine died")
        launch(self)

    with monkeypatch.context() as patch:
        patch.setattr(Stack, "_launch", failing)
        with pytest.raises(RuntimeError, match="died"):
            run_study(PLAN, tmp_path, FAST)
    assert run_study(PLAN, tmp_path, FAST).finished == 3
    compare(tmp_path, undisturbed, exact=True)  # on a CPU what was lost is repeated to the bit


@pytest.mark.slow
def test_killed_while_finishing_nothing_stands_twice(undisturbed, tmp_path, monkeypatch):
    import dpivon.study.results.folder as folder

    with monkeypatch.context() as patch:
        patch.setattr(folder.shutil, "rmtree", lambda path: (_ for _ in ()).throw(RuntimeError("killed")))
        with pytest.raises(RuntimeError, match="killed"):
            run_study(PLAN, tmp_path, FAST)
    assert len(table.read(tmp_path / "runs.csv")) == 1
    assert run_study(PLAN, tmp_path, FAST).finished == 3
    compare(tmp_path, undisturbed, exact=True)


@pytest.mark.slow
def test_killed_for_good_on_a_bare_machine_and_resumed(undisturbed, tmp_path):
    PLAN.write(tmp_path / "plan.json")
    out = tmp_path / "out"
    command = [sys.executable, "-c", BARE, str(tmp_path / "plan.json"), str(out), "2", "0.0001"]
    root = Path(__file__).parents[2]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(root / "src"), *sys.path])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while (
        not [f for f in out.glob("stacks/*/release-*.safetensors") if not f.name.endswith("-000000000000.safetensors")]
        and time.monotonic() < deadline
    ):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(table.read(out / "runs.csv")) < 3
    assert read(next(out.glob("stacks/*/ledger.jsonl"))).releases >= 1
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 of 3 runs finished" in done.stdout
    compare(out, undisturbed, exact=True)


def test_results_of_two_plans_never_meet(undisturbed, tmp_path):
    other = Plan(**{**vars(PLAN), "epochs": 2})
    with pytest.raises(ArgumentError, match="another plan"):
        run_study(other, undisturbed, FAST)
    other.write(tmp_path / "other.json")
    refused = CliRunner().invoke(app, ["study", "run", str(tmp_path / "other.json"), "--out", str(undisturbed), "-q"])
    assert refused.exit_code == 2
    assert "another plan" in refused.stderr


@pytest.mark.slow
def test_a_plan_that_grew_goes_on_from_what_is_finished(undisturbed, tmp_path):
    less = replace(PLAN, runs=PLAN.runs[:2])
    run_study(less, tmp_path, FAST)
    before = (tmp_path / "runs.csv").read_text()
    assert run_study(PLAN, tmp_path, FAST).finished == 3
    assert (tmp_path / "runs.csv").read_text().startswith(before)
    compare(tmp_path, undisturbed, exact=True)
    for other in (less, replace(PLAN, runs=(*PLAN.runs, replace(PLAN.runs[0], seed=1)), seed=1)):
        with pytest.raises(ArgumentError, match="another plan"):  # fewer runs, or anything else besides more of them
            run_study(other, tmp_path, FAST)


def test_two_processes_never_run_one_study(tmp_path, monkeypatch):
    inside, leave, errors = threading.Event(), threading.Event(), []

    def waiting(self, steps):
        inside.set()
        leave.wait(30)
        raise RuntimeError("enough")
        yield

    monkeypatch.setattr(Stack, "train", waiting)

    def first():
        try:
            run_study(PLAN, tmp_path, FAST)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    with pytest.raises(DpivonError, match="another process"):
        run_study(PLAN, tmp_path, FAST)
    leave.set()
    thread.join()
    assert errors == ["enough"]


def test_stacks_under_way_stay_together_whatever_size_is_asked_for(tmp_path):
    ids = [PLAN.runs[0].id, PLAN.runs[1].id]
    folder = tmp_path / "stacks" / "0001"
    folder.mkdir(parents=True)
    (folder / "runs.json").write_text(json.dumps(ids))
    found = group(PLAN, tmp_path, 1)
    assert [(f.name, [r.id for r in runs]) for f, runs in found] == [("0001", ids), ("0000", [PLAN.runs[2].id])]
    table.write(tmp_path / "runs.csv", [{"id": ids[0]}])  # one came in from elsewhere; the other's charges remain
    assert [r.id for r in group(PLAN, tmp_path, 1)[0][1]] == ids


def test_a_stack_that_does_not_fit_is_told_what_to_do(tmp_path, monkeypatch):
    def full(self, steps):
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    monkeypatch.setattr(Stack, "train", full)
    with pytest.raises(
        DpivonError, match=r"2 runs of b=64 do not fit.*stacks/0000.*at most 0 releases.*smaller --stack"
    ):
        run_study(PLAN, tmp_path, Settings(quiet=True, device="cpu", stack=2, only="-b64-"))


@pytest.mark.slow
def test_a_part_of_a_plan(undisturbed, tmp_path):
    part = Settings(quiet=True, block=4, device="cpu", only="-b128-")
    stopped = run_study(PLAN, tmp_path, replace(part, minutes=1e-9, block=1))
    assert (stopped.finished, stopped.exit_code) == (0, 75)
    outcome = run_study(PLAN, tmp_path, part)
    assert (outcome.finished, outcome.planned, outcome.exit_code) == (1, 3, 0)  # all that was asked for
    assert [r["method"] for r in table.read(tmp_path / "runs.csv")] == ["dp-adam"]
    assert run_study(PLAN, tmp_path, FAST).finished == 3
    compare(tmp_path, undisturbed, exact=True)


def test_missing_data_and_bad_settings_are_named(tmp_path):
    plan = Plan(**{**vars(PLAN), "dataset": "cifar10", "network": "paper"})
    with pytest.raises(ArgumentError, match="dpivon data fetch cifar10"):
        run_study(plan, tmp_path / "a", Settings(data=tmp_path / "none", quiet=True))
    with pytest.raises(ArgumentError, match=r"network='text': cannot take examples of shape \(1, 8, 8\)"):
        run_study(Plan(**{**vars(PLAN), "network": "text"}), tmp_path / "b", FAST)
    for wrong, words in (({"stack": 0}, "stack=0"), ({"minutes": 0}, "minutes=0"), ({"precision": "int8"}, "int8")):
        with pytest.raises(ArgumentError, match=words):
            run_study(PLAN, tmp_path / "c", Settings(**({"quiet": True} | wrong)))
    with pytest.raises(ArgumentError, match="holds no study"):
        status_lines(tmp_path)


@pytest.mark.slow
def test_temperatures_are_chosen_last_charged_and_in_the_table(tmp_path):
    """Two runs in one stack are those two alone; the raw scores cost what training cost, the tempered ones the whole."""
    torch.set_num_threads(1)
    runs = (PlannedRun("dp-steady", 256, 1.0, 1.0, 0, 5.0), PlannedRun("dp-sgd", 256, 2.0, 1.0, 0, 0.5))
    plan = replace(PLAN, name="tempered", runs=runs, temperature_noise=5.0)
    tables = []
    for stack in (1, 2):
        out = tmp_path / str(stack)
        assert run_study(plan, out, replace(FAST, stack=stack)).finished == 2
        tables.append({row["method"]: row for row in table.read(out / "runs.csv")})
    for planned in runs:
        alone, together = (found[planned.method] for found in tables)
        for key in ("accuracy", "nll", "tempered_nll", "tempered_ece", "temperature", "mc_nll"):
            assert (
                alone[key] == pytest.approx(together[key], rel=1e-3, nan_ok=True) if alone[key] else not together[key]
            )
        cost = {"dataset_size": 1497, "batch_size": 256, "epochs": 1, "delta": 1e-4, "accountant": "rdp"}
        sigma = planned.noise_multiplier
        raw = budget(**cost, noise_multiplier=sigma)
        whole = budget(**cost, noise_multiplier=sigma, also=[temperature_cost(5.0)])
        assert together["epsilon"] == pytest.approx(raw.epsilon)
        assert together["epsilon_tempered"] == pytest.approx(whole.epsilon)
        assert 1 / 8 < together["temperature"] < 8
    assert tables[1]["dp-steady"]["mc_samples"] == 2  # it has width by default
    (ledger,) = (tmp_path / "2" / "ledgers").glob("*/ledger.jsonl")
    record = read(ledger)
    assert [row[0][0]["mechanism"] for row in record.rows] == ["gaussian, Poisson-sampled", "gaussian, temperature"]
    assert record.releases == 6 + 6
