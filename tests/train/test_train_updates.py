"""Last year's posterior is this year's prior: `dpivon train --start-from` an earlier run, whose releases count towards ε."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner
from whole_runs import Dies, posterior, same

from clinic import as_flags, clinic, rows, write_csv
from dpivon import DpivonError, PrivacyWarning
from dpivon.cli import app
from dpivon.durable.ledger import read as read_ledger
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.accounting.recorded import LEDGER, history, started_from
from dpivon.train import load, resolve, train
from dpivon.train import run as running

DELTA = 1e-4
EVERY = {"prior": "count", "coverage": 0.9}  # releases besides gradients: counts, factors and prediction sets


@pytest.fixture(scope="module")
def years(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """Three years of one model: the folders one, two and three, what their runs have in common, and their summaries."""
    folder = tmp_path_factory.mktemp("years")
    common = clinic(folder) | {"seed": 5, "epochs": 2}
    first = common | EVERY | {"calibration": str(folder / "test.csv"), "epsilon": 2.0, "out": str(folder / "one")}
    write_csv(folder / "later.csv", rows(300, seed=2))
    common["data"] = str(folder / "later.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "_report", lambda folder, watcher: None)
        summaries = [train(resolve(first))]
        for budget, before, after in ((3.0, "one", "two"), (4.0, "two", "three")):
            options = {"start_from": str(folder / before), "epsilon": budget, "out": str(folder / after)}
            summaries.append(train(resolve(common | options)))
    return folder, common, summaries


def ledger(folder: Path) -> Any:
    return read_ledger(folder / "ledger.jsonl")


def shown(run: Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["ledger", "show", str(run), "--json"])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    return found["runs"][0]


def test_epsilon_is_that_of_both_histories_together(years: Any) -> None:
    folder, common, (one, two, _) = years
    before, after = history(ledger(folder / "one"), 0), history(ledger(folder / "two"), 0, earlier=False)
    assert [row[2] for row in before] == [1, 12, 4, 6]  # counts, gradients, factors, prediction sets
    assert sum(row[2] for row in after) == two["steps"] == 12
    together = epsilon([*before, *after], DELTA)
    assert two["epsilon"] == pytest.approx(together)
    assert one["epsilon"] < 2.0 < 2.9 < together <= 3.0
    alone = epsilon(after, DELTA)
    assert two["started_from"]["own_epsilon"] == pytest.approx(alone)
    assert alone < together
    again = resolve(common | {"epsilon": 3.0, "out": str(folder / "alone")})
    assert two["noise_multiplier"] > train(again)["noise_multiplier"]


def test_the_ledger_alone_says_so_and_whose_each_release_is(years: Any) -> None:
    folder, _, (one, two, _) = years
    found = shown(folder / "two")
    assert found["epsilon"]["pld"] == pytest.approx(two["epsilon"])
    assert found["earlier"] == {ledger(folder / "one").id: one["releases"]}
    text = CliRunner().invoke(app, ["ledger", "show", str(folder / "two")]).stdout
    assert f"{one['releases']} × of the earlier run {ledger(folder / 'one').id}" in text
    assert CliRunner().invoke(app, ["ledger", "verify", str(folder / "two")]).exit_code == 0
    marked = ["earlier" in terms[0] for terms, _ in ledger(folder / "two").rows]
    assert marked == sorted(marked, reverse=True)  # before the first release of the run itself
    assert json.loads((folder / "two" / "model" / "privacy.json").read_text())["epsilon"]["pld"] == two["epsilon"]


def test_a_chain_carries_all_three(years: Any) -> None:
    folder, _, (one, two, three) = years
    ids = [ledger(folder / name).id for name in ("one", "two")]
    assert started_from(ledger(folder / "three"), 0) == dict(zip(ids, (one["releases"], two["steps"]), strict=True))
    every = history(ledger(folder / "one"), 0)
    for name in ("two", "three"):
        every = every + history(ledger(folder / name), 0, earlier=False)
    assert three["epsilon"] == pytest.approx(epsilon(every, DELTA))
    assert 3.9 < three["epsilon"] <= 4.0
    assert three["started_from"]["run"] == ids[1]
    assert three["started_from"]["epsilon"] == pytest.approx(two["epsilon"])


def test_terminal_report_and_card_say_it_in_one_sentence(years: Any, tmp_path: Path) -> None:
    folder, common, (_, two, _) = years
    said = two["started_from"]["sentence"]
    assert said.startswith(f"The run started from run {ledger(folder / 'one').id}, which had spent ε = 2.0")
    assert "together ε = 3.00 at δ = 0.0001, and rows that are only in this run's data have at most" in said
    options = common | {"start_from": str(folder / "one"), "epsilon": 3.0, "out": str(folder / "two")}
    words = ["train", *as_flags(options)]
    terminal = CliRunner().invoke(app, words, terminal_width=10_000)
    assert " ".join(said.split()[:8]) in " ".join(terminal.stdout.split())
    report = (folder / "two" / "report.html").read_text()  # written now, since the run had none
    assert said.replace("'", "&#39;") in report
    assert CliRunner().invoke(app, ["export", str(folder / "two"), "--out", str(tmp_path / "out")]).exit_code == 0
    assert said in (tmp_path / "out" / "model-card.md").read_text()


def test_an_older_copy_of_a_ledger_is_no_history(years: Any, tmp_path: Path) -> None:
    folder, common, _ = years
    shutil.copytree(folder / "one", tmp_path / "one")
    path = tmp_path / "one" / LEDGER
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]))
    for start in (tmp_path / "one", tmp_path / "one" / "model"):
        options = common | {"start_from": str(start), "epsilon": 3.0, "out": str(tmp_path / "two")}
        with pytest.raises(DpivonError, match=r"start_from=.*holds a finished run of \d+ releases and a ledger of \d+"):
            train(resolve(options))
        assert not (tmp_path / "two").exists()


def test_a_published_folder_does_as_well_unless_its_history_is_not_complete(years: Any, tmp_path: Path) -> None:
    folder, common, (_, two, _) = years
    assert CliRunner().invoke(app, ["export", str(folder / "one"), "--out", str(tmp_path / "one")]).exit_code == 0
    options = common | {"start_from": str(tmp_path / "one"), "epsilon": 3.0, "out": str(tmp_path / "two")}
    found = train(resolve(options))
    assert found["epsilon"] == two["epsilon"]
    assert same(posterior(tmp_path / "two"), posterior(folder / "two"))
    assert history(ledger(tmp_path / "two"), 0) == history(ledger(folder / "two"), 0)
    stated = json.loads((tmp_path / "one" / "privacy.json").read_text())
    short, unnamed = stated | {"releases": stated["releases"][:1]}, {k: v for k, v in stated.items() if k != "run"}
    for spoilt, problem in ((short, "some are missing"), (unnamed, "no complete history"), ({}, "no complete history")):
        (tmp_path / "one" / "privacy.json").write_text(json.dumps(spoilt))
        with pytest.raises(DpivonError, match=f"start_from=.*{problem}.*Give the folder of the run itself"):
            train(resolve(options | {"out": str(tmp_path / "none")}))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("epsilon", [1.5, 1.99])
def test_a_budget_that_is_spent_is_refused_before_anything_is_written(
    years: Any, tmp_path: Path, epsilon: float
) -> None:
    folder, common, _ = years
    options = common | {"start_from": str(folder / "one"), "epsilon": epsilon, "out": str(tmp_path / "none")}
    with pytest.raises(DpivonError, match=rf"^epsilon={epsilon}: .* has spent ε = 2\.0.* above 2\.0"):
        train(resolve(options))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"columns": {"age": {"min": 0, "max": 90}}}, r"^columns\.age\.max=90\.0: .*has 100\.0"),
        ({"ignore": ["note", "dose"], "columns": {"age": {"min": 0, "max": 100}}}, r"^columns\.dose=None"),
        ({"classes": ["no", "yes"]}, r"^classes=\['no', 'yes'\]"),
        ({"hidden": [9]}, r"^hidden=\(9,\): .*has \(8,\)"),
        ({"network": "table"}, r"^network='table': .*has 'mlp'"),
        ({"unit": "note"}, r"^unit='note': .*one row"),
    ],
    ids=["bounds", "columns", "classes", "widths", "network", "unit"],
)
def test_another_model_or_unit_is_refused(years: Any, tmp_path: Path, change: Any, problem: str) -> None:
    folder, common, _ = years
    options = common | {"start_from": str(folder / "one"), "epsilon": 3.0, "out": str(tmp_path / "none")}
    with pytest.raises(DpivonError, match=problem) as caught:
        train(resolve(options | change))
    assert "--start-from out" in str(caught.value)
    assert not (tmp_path / "none").exists()


def test_an_unfinished_run_and_a_bare_posterior_are_refused(years: Any, tmp_path: Path) -> None:
    folder, common, _ = years
    with pytest.raises(MemoryError):
        train(resolve(common | {"out": str(tmp_path / "half")}), Dies(3))
    file = folder / "one" / "model" / "posterior.safetensors"
    for start, problem in ((tmp_path / "half", "is a run that is not finished"), (file, "is not in this run's ledger")):
        with pytest.raises(DpivonError, match=f"start_from=.*{problem}"):
            train(resolve(common | {"start_from": str(start), "out": str(tmp_path / "none")}))


@pytest.mark.parametrize("after", [1, 7])
def test_it_goes_on_to_the_bit_and_charges_the_earlier_releases_once(years: Any, tmp_path: Path, after: int) -> None:
    folder, common, (one, two, _) = years
    options = common | {"start_from": str(folder / "one"), "epsilon": 3.0, "out": str(tmp_path / "two")}
    with pytest.raises(MemoryError):
        train(resolve(options), Dies(after))
    assert ledger(tmp_path / "two").releases == one["releases"] + after
    assert ledger(tmp_path / "two").earlier == one["releases"]
    found = train(resolve(options))
    assert same(posterior(tmp_path / "two"), posterior(folder / "two"))
    assert found["epsilon"] == two["epsilon"]
    assert found["releases"] == two["releases"] == one["releases"] + 12


def test_it_does_not_go_on_from_an_earlier_run_that_has_changed(years: Any, tmp_path: Path) -> None:
    folder, common, _ = years
    shutil.copytree(folder / "one", tmp_path / "one")
    options = common | {"start_from": str(tmp_path / "one"), "epsilon": 3.0, "out": str(tmp_path / "two")}
    with pytest.raises(MemoryError):
        train(resolve(options), Dies(2))
    kept = load(tmp_path / "one").posterior
    file = tmp_path / "one" / "model" / "posterior.safetensors"
    moved = type(kept)({name: m + 1e-3 for name, m in kept.mean.items()}, kept.variance, kept.metadata)
    moved.save(file)
    with pytest.raises(DpivonError, match=r"start_from=.* has changed since the run in .* was begun"):
        train(resolve(options))
    kept.save(file)
    shutil.copy(folder / "three" / "ledger.jsonl", tmp_path / "one" / "ledger.jsonl")  # with more releases
    with pytest.raises(DpivonError):
        train(resolve(options))
    shutil.copy(folder / "one" / "ledger.jsonl", tmp_path / "one" / "ledger.jsonl")
    assert train(resolve(options))["steps"] == 12


def test_a_finished_run_needs_the_earlier_one_no_more(years: Any, tmp_path: Path) -> None:
    folder, common, _ = years
    shutil.copytree(folder / "one", tmp_path / "one")
    options = common | {"start_from": str(tmp_path / "one"), "epsilon": 3.0, "out": str(tmp_path / "two")}
    summary = train(resolve(options))
    shutil.rmtree(tmp_path / "one")
    assert train(resolve(options)) == summary


@pytest.mark.parametrize("method", ["dp-ivon-gradsq", "dp-steady", "dp-sgd"])
def test_it_starts_at_the_earlier_mean_with_the_last_layer_and_the_prior_where_there_is_one(
    years: Any, method: str
) -> None:
    folder, common, _ = years
    config = resolve({**common, "method": method, "start_from": str(folder / "one"), "out": "none"})
    earlier = load(folder / "one").posterior
    learner = running.describe(config).learner(start=earlier)
    for name, p in learner.model.named_parameters():
        assert torch.equal(p, earlier.mean[name])
    assert learner.takes_prior == (method != "dp-sgd")
    if learner.takes_prior:
        (group,) = learner.optimizer.param_groups
        for p, name in zip(group["params"], earlier.mean, strict=True):
            given = learner.optimizer._prior_of(p, group)
            name = next(n for n, own in learner.model.named_parameters() if own is p)
            torch.testing.assert_close(given["prior_mean"], earlier.mean[name])
            torch.testing.assert_close(given["prior_decay"], 1 / (earlier.variance[name] * group["ess"]))


@pytest.mark.slow
def test_a_line_torn_before_the_first_release_charges_one_more_and_not_the_earlier_run_again(
    years: Any, tmp_path: Path
) -> None:
    folder, common, (one, _, _) = years
    options = common | {"start_from": str(folder / "one"), "epsilon": 3.0, "out": str(tmp_path / "two")}
    with pytest.raises(MemoryError):
        train(resolve(options), Dies(1))
    path = tmp_path / "two" / "ledger.jsonl"
    *whole, _, last, end = path.read_bytes().split(b"\n")
    assert (b'"n":1' in last, end) == (True, b"")
    path.write_bytes(b"\n".join([*whole, last[:9]]))  # the terms of the run and its first charge, torn by a crash
    with pytest.warns(PrivacyWarning, match="1 releases were made and lost"):
        found = train(resolve(options))
    assert one["releases"] + 12 <= found["releases"] <= one["releases"] + 13
    assert found["epsilon"] <= 3.0


@pytest.mark.slow
def test_people_compose_and_rows_do_not_follow_them(tmp_path: Path) -> None:
    options = clinic(tmp_path) | {"unit": "patient", "dataset_size": 100, "batch_size": 20, "epochs": 1, "delta": 1e-3}
    header, *cells = [line.split(",") for line in (tmp_path / "train.csv").read_text().splitlines()]
    lines = [[*header, "patient"], *([*row, f"p{i % 100}"] for i, row in enumerate(cells))]
    (tmp_path / "train.csv").write_text("\n".join(",".join(line) for line in lines) + "\n")
    first = train(resolve(options | {"epsilon": 2.0, "out": str(tmp_path / "one")}))
    later = options | {"start_from": str(tmp_path / "one"), "epsilon": 3.0, "out": str(tmp_path / "two")}
    second = train(resolve(later | {"rows_per_unit": 2}))
    assert (ledger(tmp_path / "two").unit, ledger(tmp_path / "two").earlier) == ("patient", first["releases"])
    assert "and people that are only in this run's data" in second["started_from"]["sentence"]
    alone = {name: value for name, value in later.items() if name != "unit"} | {"ignore": ["note", "patient"]}
    with pytest.raises(DpivonError, match=r"unit=None: .*person with all their rows.*Give --unit patient"):
        train(resolve(alone | {"out": str(tmp_path / "none")}), proceed=True)


def test_the_same_seed_draws_other_noise_in_the_next_run(years: Any) -> None:
    from dpivon.train.loop import Seeds

    folder, _, _ = years
    after = load(folder / "one").posterior.digest
    assert Seeds(5, after).number("noise") != Seeds(5).number("noise")
    assert Seeds(5, "abc").number("noise") == 2156767883132717874  # a resumed run draws as it was begun
    assert Seeds(5).number("noise") == 894514872134007861
