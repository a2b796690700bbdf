"""Runs that are killed, stopped or started again go on to the bit, and charge nothing twice."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
from whole_runs import Dies, posterior, same, slow

from clinic import clinic, rows, write_csv
from dpivon import DpivonError, PrivacyWarning
from dpivon.durable.ledger import read as read_ledger
from dpivon.train import load, resolve, train
from dpivon.train import run as running
from dpivon.train.artefacts import read_progress
from dpivon.train.run import Watcher

pytestmark = pytest.mark.usefixtures("no_report")


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("after", [1, pytest.param(6, marks=slow), 7, pytest.param(15, marks=slow), 24])
def test_killed_at_any_step_it_goes_on_to_the_bit_and_charges_nothing_twice(
    whole: Any, tmp_path: Path, after: int
) -> None:
    options, summary = whole
    options = options | {"out": str(tmp_path / "run")}
    with pytest.raises(MemoryError):
        train(resolve(options), Dies(after))
    charged = read_ledger(tmp_path / "run" / "ledger.jsonl").releases
    assert charged == after
    found = train(resolve(options))
    assert same(posterior(options["out"]), posterior(whole[0]["out"]))
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").releases == 24
    assert found["epsilon"] == summary["epsilon"]
    assert found["metrics"] == summary["metrics"]
    lines, others = (read_progress(Path(o["out"]) / "progress.jsonl") for o in (options, whole[0]))
    assert [line.step for line in lines] == [line.step for line in others]
    assert [line.heldout_nll for line in lines] == [line.heldout_nll for line in others]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"physical_batch_size": 16}, marks=slow),
        pytest.param({"method": "dp-ivon-gradsq", "options": {"mc_samples": 2}}, marks=slow),
        pytest.param({"method": "dp-adam", "ema": 0.9}, marks=slow),
        {"method": "dp-mc-dropout", "physical_batch_size": 16},
        pytest.param({"method": "dp-sgld"}, marks=slow),
        pytest.param({"method": "dp-bbp"}, marks=slow),
    ],
    ids=str,
)
def test_so_do_micro_batches_averages_and_the_other_posteriors(tmp_path: Path, change: dict[str, Any]) -> None:
    options = clinic(tmp_path) | {"seed": 5, "epochs": 2} | change
    for name in ("a", "b"):
        config = resolve(options | {"out": str(tmp_path / name)})
        if name == "b":
            with pytest.raises(MemoryError):
                train(config, Dies(9))
        assert train(config)["releases"] == 12
    assert same(posterior(tmp_path / "a"), posterior(tmp_path / "b"))


@pytest.mark.slow
def test_one_process_at_a_time(tmp_path: Path) -> None:
    class Again(Watcher):
        def begin(self, config: Any, description: Any, loop: Any) -> Any:
            with pytest.raises(DpivonError, match="another process is using it"):
                train(config)
            raise KeyboardInterrupt

    config = resolve(clinic(tmp_path) | {"epochs": 1})
    with pytest.raises(KeyboardInterrupt):
        train(config, Again())
    assert train(config)["releases"] == 6


def test_killed_for_real(whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 of a process in the middle of the steps; then the same run to the end."""
    monkeypatch.setattr(running, "_report", lambda folder, watcher: None)
    options = whole[0] | {"out": str(tmp_path / "run"), "checkpoint_seconds": 1e-6}
    process = multiprocessing.get_context("fork").Process(target=train, args=(resolve(options), KilledAtStep9()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert _lines(tmp_path / "run" / "ledger.jsonl") >= 9
    assert not (tmp_path / "run" / "summary.json").exists()
    assert train(resolve(options))["releases"] == 24
    assert same(posterior(options["out"]), posterior(whole[0]["out"]))


class KilledAtStep9(Watcher):
    def begin(self, config: Any, description: Any, loop: Any) -> Any:
        return lambda line, step: os.kill(os.getpid(), signal.SIGKILL) if step == 9 and line is None else None


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_signal_saves_and_the_same_run_goes_on(whole: Any, tmp_path: Path) -> None:
    class Interrupts(Watcher):
        def begin(self, config: Any, description: Any, loop: Any) -> Any:
            return lambda line, step: signal.raise_signal(signal.SIGTERM) if step == 9 and line is None else None

    options = whole[0] | {"out": str(tmp_path / "run")}
    with pytest.raises(SystemExit) as caught:
        train(resolve(options), Interrupts())
    assert caught.value.code == 143
    train(resolve(options))
    assert same(posterior(options["out"]), posterior(whole[0]["out"]))


def test_killed_while_it_publishes_it_publishes_again(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = whole[0] | {"out": str(tmp_path / "run")}
    with monkeypatch.context() as patch:
        patch.setattr(running, "write_test", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(resolve(options))
    with monkeypatch.context() as patch:
        patch.setattr(running, "load", lambda *args: 1 / 0)
        (tmp_path / "run" / "model").rename(tmp_path / "run" / ".model.tmp")
        with pytest.raises(ZeroDivisionError):
            train(resolve(options))
    assert train(resolve(options))["releases"] == 24
    assert same(posterior(options["out"]), posterior(whole[0]["out"]))


def test_what_was_lost_for_good_stays_charged_and_the_budget_stops_the_step_that_would_pass_it(tmp_path: Path) -> None:
    """With noise from the operating system nothing can be repeated: 7 lost releases are 7 steps fewer, not more ε."""
    options = clinic(tmp_path) | {"secure": True}
    with pytest.raises(MemoryError):
        train(resolve(options), Dies(7))
    for checkpoint in (tmp_path / "run").glob("release-*"):
        checkpoint.unlink()
    with pytest.warns(PrivacyWarning, match="7 releases were made and lost"):
        summary = train(resolve(options))
    assert (summary["releases"], summary["steps"]) == (24, 17)
    assert summary["epsilon"] <= 4.0
    assert load(Path(options["out"])).posterior.num_parameters > 0


def test_a_finished_run_says_so_again_without_the_data(whole: Any, tmp_path: Path) -> None:
    options, summary = whole
    before = (Path(options["out"]) / "ledger.jsonl").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(resolve(options)) == summary
    assert (Path(options["out"]) / "ledger.jsonl").read_bytes() == before


def test_a_finished_run_whose_ledger_is_gone_or_an_older_copy_is_refused(tmp_path: Path) -> None:
    options = clinic(tmp_path) | {"epochs": 1}
    assert train(resolve(options))["releases"] == 6
    ledger = Path(options["out"]) / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    for text, has in (("".join(lines[:-2]), r"a ledger of \d"), (None, "no ledger")):
        ledger.unlink() if text is None else ledger.write_text(text)
        with pytest.raises(DpivonError, match=f"^out=.* holds a finished run of 6 releases and {has}.* Put its ledger"):
            train(resolve(options))
        assert ledger.exists() == (text is not None)
    ledger.write_text("".join(lines))
    assert train(resolve(options))["releases"] == 6


def test_a_finished_run_scores_test_data_that_comes_later(tmp_path: Path) -> None:
    options = clinic(tmp_path) | {"epochs": 1}
    assert train(resolve(options))["metrics"] is None
    (tmp_path / "train.csv").unlink()
    later = train(resolve(options | {"test": str(tmp_path / "test.csv")}))
    assert 0 < later["metrics"]["mc_accuracy"] <= 1
    assert later["releases"] == 6


@pytest.mark.parametrize("change", [{"epsilon": 8.0}, {"batch_size": 60}, {"seed": 6}, {"classes": ["no", "yes"]}, {"lr": 0.3},
                                    {"columns": {"age": {"min": 0, "max": 90}}}])  # fmt: skip
def test_a_run_does_not_go_on_as_another(whole: Any, change: dict[str, Any]) -> None:
    options, _ = whole
    name = "columns.age" if "columns" in change else next(iter(change))  # the entry that differs, not all of them
    with pytest.raises(DpivonError, match=f"^{name}=.* was begun with") as caught:
        train(resolve(options | change))
    assert "--out" in str(caught.value)


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    options = clinic(tmp_path)
    with pytest.raises(MemoryError):
        train(resolve(options), Dies(8))
    table = rows(300)
    table[17][0] += 1
    write_csv(tmp_path / "train.csv", table)
    with pytest.raises(DpivonError, match="was begun with other data"):
        train(resolve(options))
