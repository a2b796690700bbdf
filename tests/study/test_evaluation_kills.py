"""An evaluation that is really killed, wherever that may be: its rows, accounts and answers are those of one that was not."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from tiny_study import PLAN

from dpivon import budget, temperature_cost
from dpivon.durable.ledger import read
from dpivon.privacy.noise import TorchNoise
from dpivon.privacy.stack import StackedMechanism
from dpivon.privacy.temperature import HALVINGS, temperature_releases, temperature_spec
from dpivon.stacked import Stack
from dpivon.study.cluster.desk import Desk, Superseded
from dpivon.study.plan.data import load_data
from dpivon.study.plan.plan import PlannedRun, noise_seed
from dpivon.study.results import table
from dpivon.study.results.folder import status_lines, under_way
from dpivon.study.run import evaluation, runner
from dpivon.study.run.evaluation import ASKED, StackEvaluation, TemperatureQueries
from dpivon.study.run.progress import Progress
from dpivon.study.run.runner import run_study
from dpivon.study.run.settings import Settings
from dpivon.study.run.work import Custody, Work

# Since Python 3.12 a fork beside other threads is warned of; here nobody else computes.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
RUNS = (
    PlannedRun("dp-sgd", 256, 1.0, 1.0, 0, 0.5),
    PlannedRun("dp-steady", 256, 1.0, 1.0, 0, 5.0),
    PlannedRun("dp-ivon-gradsq", 256, 2.0, 1.0, 0, 0.5),
)
TEMPERED = replace(PLAN, name="killed", runs=RUNS, temperature_noise=5.0)
ONE_BY_ONE = Settings(quiet=True, device="cpu", stack=3, checkpoint_seconds=1e-9)  # a group a run
STEPS = 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A stack that was killed when its training was done."""
    out = tmp_path_factory.mktemp("trained")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StackEvaluation, "evaluate", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_study(TEMPERED, out, ONE_BY_ONE)
    return out


def rows_of(out):
    rows = table.read(out / "runs.csv")
    found = {row["id"]: {k: v for k, v in row.items() if k != "seconds"} for row in rows}
    assert len(found) == len(rows)
    return found


def copied(trained, out):
    shutil.copytree(trained, out)
    return out


def finish(out, monkeypatch, settings=ONE_BY_ONE):
    """Nothing is left to train."""
    monkeypatch.setattr(Stack, "train", lambda *a: pytest.fail("trained again"))
    assert run_study(TEMPERED, out, settings).finished == 3
    assert not list((out / "stacks").iterdir())
    (ledger,) = (out / "ledgers").glob("*/ledger.jsonl")
    return read(ledger)


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory):
    out = copied(trained, tmp_path_factory.mktemp("whole") / "out")
    with pytest.MonkeyPatch.context() as patch:
        record = finish(out, patch)
    assert (record.releases, temperature_releases(record)) == (STEPS + HALVINGS, HALVINGS)
    return rows_of(out)


def dies(patch, owner, name, call, *, after=False):
    """The process is killed in the given call of a function, before or after it did its work."""
    function, calls = getattr(owner, name), []

    def deadly(*args, **kwargs):
        calls.append(1)
        if len(calls) == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = function(*args, **kwargs)
        if len(calls) == call and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    patch.setattr(owner, name, deadly)


def killed(out, *moment, settings=ONE_BY_ONE, **options):
    """Evaluate in a process of its own, which does not survive it."""
    child = os.fork()
    if child == 0:
        try:
            with pytest.MonkeyPatch.context() as patch:
                dies(patch, *moment, **options)
                run_study(TEMPERED, out, settings)
        finally:
            os._exit(0)  # it should not have come to this
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


MOMENTS = {
    "before anything": ((evaluation, "predict_row", 1), {}, 0),
    "in the second run": ((evaluation, "predict_row", 2), {}, 1),
    "before the file of questions": ((TemperatureQueries, "_write", 1), {}, 0),
    "between the file and the charge": ((StackedMechanism, "charge_beside", 1), {}, 0),
    "after the charge": ((StackedMechanism, "charge_beside", 1), {"after": True}, 0),
    "asked, before the first answer": ((TorchNoise, "normal", 1), {}, 0),
    "after the fourth answer": ((TorchNoise, "normal", 4), {"after": True}, 0),
    "asked, in the second run": ((TorchNoise, "normal", HALVINGS + 2), {}, 1),
    "before the second row": ((runner, "record", 2), {}, 1),
    "between the tables": ((table, "add", 4), {}, 1),
    "before clearing up": ((runner, "retire", 1), {}, 3),
}


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_changes_no_row_no_account_and_no_answer(trained, whole, tmp_path, monkeypatch, moment):
    where, options, written = MOMENTS[moment]
    out = copied(trained, tmp_path / "out")
    killed(out, *where, **options)
    before = table.read(out / "runs.csv")
    assert len(before) == written
    record = finish(out, monkeypatch)
    assert rows_of(out) == whole
    assert (record.releases, temperature_releases(record)) == (STEPS + HALVINGS, HALVINGS)
    assert [
        row for row in table.read(out / "runs.csv") if row in before
    ] == before  # even the seconds: not evaluated again


@pytest.mark.slow
def test_killed_again_and_again(trained, whole, tmp_path, monkeypatch):
    out = copied(trained, tmp_path / "out")
    for call in (3, 2, 1, 5):
        killed(out, TorchNoise, "normal", call)
    killed(out, TorchNoise, "normal", HALVINGS + 1)
    assert len(table.read(out / "runs.csv")) == 1
    record = finish(out, monkeypatch)
    assert rows_of(out) == whole
    assert temperature_releases(record) == HALVINGS


def test_groups_change_nothing(trained, whole, tmp_path, monkeypatch):
    """All in one group; and one alone, then two."""
    out, other = (copied(trained, tmp_path / name) for name in ("a", "b"))
    finish(out, monkeypatch, replace(ONE_BY_ONE, checkpoint_seconds=60.0))
    assert rows_of(out) == whole
    killed(other, evaluation, "predict_row", 2)
    finish(other, monkeypatch, replace(ONE_BY_ONE, checkpoint_seconds=60.0))
    assert rows_of(other) == whole


def rounded(predicted):
    """As on a GPU that rounds differently."""

    def found_otherwise(*args, **kwargs):
        found = predicted(*args, **kwargs)
        for answers in found.values():
            for answer in answers:
                answer.probs.mul_(1 - 1e-6)
        return found

    return found_otherwise


def test_other_sums_get_other_noise_and_are_charged_again(trained, whole, tmp_path, monkeypatch):
    """What was answered and lost is not what would be answered now."""
    out, drawn = copied(trained, tmp_path / "out"), []
    killed(out, TorchNoise, "normal", HALVINGS + 2)  # the second run was asked twice
    normal = TorchNoise.normal

    def noted(self, like, std):
        noise = normal(self, like, std)
        drawn.append(float(noise))
        return noise

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "predict_row", rounded(evaluation.predict_row))
        patch.setattr(TorchNoise, "normal", noted)
        record = finish(out, patch)
    assert (record.releases, temperature_releases(record)) == (STEPS + 2 * HALVINGS, 2 * HALVINGS)
    rows = list(rows_of(out).values())
    assert len(drawn) == 2 * HALVINGS  # the two runs that were left, and nothing of the old stream
    like, width = torch.zeros(1, dtype=torch.float64), temperature_spec(5.0).noise_std
    first = {
        float(normal(TorchNoise(torch.Generator().manual_seed(noise_seed(TEMPERED, r))), like, width)) for r in RUNS
    }
    assert not first & set(drawn)
    for row in rows:
        cost = {"dataset_size": 1497, "batch_size": 256, "epochs": 1, "delta": 1e-4, "accountant": "rdp"}
        sigma, choices = row["noise_multiplier"], 1 if row == whole[row["id"]] else 2
        assert row["epsilon"] == pytest.approx(budget(**cost, noise_multiplier=sigma).epsilon)
        whole_cost = budget(**cost, noise_multiplier=sigma, also=choices * [temperature_cost(5.0)])
        assert row["epsilon_tempered"] == pytest.approx(whole_cost.epsilon)
        assert (row["releases"], row["steps"]) == (STEPS, STEPS)
    assert sum(row == whole[row["id"]] for row in rows) == 1  # the first, which had its row


class Fenced(Custody):
    """A worker that sees the folder, as :mod:`dpivon.study.cluster.attempt` has it, without Ray."""

    def __init__(self, desk, stack, attempt):
        self.desk, self.of = desk, (stack, attempt)
        desk.expect(*self.of)

    def ahead(self, terms, upto):
        self.desk.reserve(*self.of, terms, upto)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("lost_in_run", [1, 2])
def test_who_was_given_up_leaves_the_questions_of_a_newer_attempt_alone(trained, tmp_path, monkeypatch, lost_in_run):
    """On a drive whose locks do not hold. Its own note in their place, what they asked would have been forgotten: asked again
    with other sums, they would have got the same noise."""
    monkeypatch.setattr(fcntl, "flock", lambda *a: None)
    out, cpu = copied(trained, tmp_path / "out"), torch.device("cpu")
    ((folder, ids),) = under_way(TEMPERED, out)
    runs = [next(run for run in RUNS if run.id == i) for i in ids]
    data, desk, predicted, calls = load_data(TEMPERED, tmp_path, cpu), Desk(out / "stacks"), evaluation.predict_row, []

    def evaluate(attempt):
        with Progress(1.0, 0.0, quiet=True) as progress:
            custody = Fenced(desk, folder.name, attempt)
            work = Work(TEMPERED, runs, folder, data, ONE_BY_ONE, cpu, progress, "one", custody)
            with closing(work.kept):
                work.evaluate(lambda results: None)

    def taken_over_in(*args, **kwargs):
        calls.append(1)
        if len(calls) == lost_in_run:
            evaluate(attempt=2)
            calls.append((folder / ASKED).read_bytes())
        return predicted(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "predict_row", taken_over_in)
        with pytest.raises(Superseded):
            evaluate(attempt=1)
    (newer,) = (call for call in calls if call != 1)
    assert sorted(json.loads(newer)["sums"]) == sorted(ids)
    assert (folder / ASKED).read_bytes() == newer
    assert temperature_releases(read(folder / "ledger.jsonl")) == HALVINGS
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "predict_row", rounded(predicted))
        assert temperature_releases(finish(out, patch)) == 2 * HALVINGS


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("spoil", [lambda path: path.unlink(), lambda path: path.write_text("{}")])
def test_questions_that_nobody_remembers_are_charged_again(trained, whole, tmp_path, monkeypatch, spoil):
    """As when a worker is lost with its disk, and its charges are known elsewhere."""
    out = copied(trained, tmp_path / "out")
    killed(out, TorchNoise, "normal", 2)
    spoil(next(out.glob("stacks/*/asked.json")))
    record = finish(out, monkeypatch)
    assert temperature_releases(record) == 2 * HALVINGS
    rows = rows_of(out)
    for name, row in rows.items():
        assert row["epsilon_tempered"] > whole[name]["epsilon_tempered"]
        raw = {k: v for k, v in row.items() if "temper" not in k}
        assert raw == {k: v for k, v in whole[name].items() if "temper" not in k}


def test_a_row_of_an_earlier_training_is_made_again(trained, whole, tmp_path, monkeypatch):
    """Its stack made more releases since, for all its runs: what the row says it cost is too little."""
    out = copied(trained, tmp_path / "out")
    killed(out, evaluation, "predict_row", 2)
    (row,) = table.read(out / "runs.csv")
    table.write(out / "runs.csv", [row | {"releases": row["releases"] - 1, "epsilon": row["epsilon"] / 2}])
    finish(out, monkeypatch)
    assert rows_of(out) == whole


def test_a_run_at_a_time_if_there_is_no_time(trained, whole, tmp_path, monkeypatch):
    out, hasty = copied(trained, tmp_path / "out"), replace(ONE_BY_ONE, minutes=1e-9)
    assert [run_study(TEMPERED, out, hasty).finished for _ in range(2)] == [1, 2]
    finish(out, monkeypatch, hasty)
    assert rows_of(out) == whole


def test_status_says_what_is_being_done_and_how_long_it_will_take(trained, tmp_path):
    out = copied(trained, tmp_path / "out")
    assert "6 releases charged to each; " in status_lines(out)[-1]
    assert "training, 6 of 6 steps are saved" in status_lines(out)[-1]
    killed(out, evaluation, "predict_row", 2)
    words = status_lines(out)[-1]
    assert "3 runs, 12 releases charged to each, 1 have their rows; " in words
    assert "s ago: evaluating run 1 of 3" in words
    for spoiled in ("", "[]", "{}"):
        next(out.glob("stacks/*/now.json")).write_text(spoiled)
        assert status_lines(out)[-1].endswith("1 have their rows")
