"""From committed tables to everything that follows from them, by command."""

from __future__ import annotations

import json
import math

import pytest
from tables import IVON, rows, tuned, two_cells
from typer.testing import CliRunner

from dpivon.cli import app
from dpivon.errors import ArgumentError
from dpivon.privacy.accounting import epsilon
from dpivon.study.plan.plan import Plan
from dpivon.study.results import table
from dpivon.study.results.summary import write_report
from dpivon.study.results.tuning import candidates, epsilon_with_tuning, pick


def invoke(*args):
    return CliRunner().invoke(app, [str(a) for a in args], prog_name="dpivon")


@pytest.fixture
def results(tmp_path):
    return two_cells(tmp_path / "paper")


def test_a_table_comes_back_as_it_was(results):
    made, _ = rows(seeds=2)
    by_id = {r["id"]: r for r in made}
    for row in table.read(results / "runs.csv"):
        for key, value in row.items():
            expected = by_id[row["id"]][key]
            if expected is None:
                assert value in (None, "")
            elif isinstance(expected, float):
                assert value == pytest.approx(expected, rel=1e-6)
            else:
                assert value == expected
        assert row["epsilon"] == by_id[row["id"]]["epsilon"]  # never rounded down


@pytest.mark.slow
def test_report_rebuilds_everything(results, tmp_path):
    (tmp_path / "tuning").mkdir()
    table.write(tmp_path / "tuning" / "tuning.csv", tuned(lambda m, lr, s: lr / 10))
    done = invoke("study", "report", results, "--tuning", tmp_path / "tuning")
    assert done.exit_code == 0, done.output
    written = [line.rsplit("/", 1)[1] for line in done.stdout.split()]
    assert written[-2:] == ["summary.csv", "tuning.md"]
    assert len(written) == 6
    after = table.read(results / "runs.csv")
    for row in after:
        history = [(row["noise_multiplier"], 512 / 50_000, 100)]
        assert row["epsilon_pld"] == epsilon(history, 1e-5, "pld")
    summary = table.read(results / "summary.csv")
    assert len(summary) == 3 * 2 * 2
    cell = next(r for r in summary if (r["method"], r["noise_multiplier"], r["max_grad_norm"]) == (IVON, 5.0, 20.0))
    members = [r for r in after if (r["method"], r["noise_multiplier"], r["max_grad_norm"]) == (IVON, 5.0, 20.0)]
    assert cell["seeds"] == len(members) == 2
    assert cell["accuracy"] == pytest.approx(sum(r["accuracy"] for r in members) / 2, rel=1e-5)
    assert cell["accuracy_std"] == pytest.approx(0.002 / math.sqrt(2), rel=1e-3)
    assert cell["epsilon_with_tuning"] == epsilon_with_tuning(members[0], tuned(lambda *a: 0.5))
    page = (results / "tuning.md").read_text()
    assert "| dp-ivon-gradsq | 1 | 0.1000 | 1.0000 | chosen |" in page
    assert "| dp-ivon-gradsq | 0.1 | 0.0100 | 1.0000 | used in the grid |" in page
    again = {p.name: p.read_bytes() for p in (results / "figures").iterdir()}
    write_report(results, tmp_path / "tuning")
    assert again == {p.name: p.read_bytes() for p in (results / "figures").iterdir()}


def test_rows_of_different_code_are_reported_only_where_that_is_allowed(results):
    before = [row | {"epsilon_pld": 1.0, "commit": "abc", "code": "1"} for row in table.read(results / "runs.csv")]
    table.write(results / "runs.csv", [*before[:-1], before[-1] | {"code": "2"}])
    done = invoke("study", "report", results)
    assert done.exit_code == 2
    assert "different code" in done.output
    assert not (results / "summary.csv").exists()
    assert invoke("study", "report", results, "--mixed-code").exit_code == 0


def test_a_rate_for_each_cell_is_no_choice_for_all(results, tmp_path):
    (tmp_path / "tuning").mkdir()
    table.write(tmp_path / "tuning" / "tuning.csv", tuned(lambda m, lr, s: lr / 10))
    rates = {1.0: 1.0, 5.0: 0.1}
    by_cell = [
        r | {"lr": rates[r["noise_multiplier"]]} if r["method"] == IVON else r for r in table.read(results / "runs.csv")
    ]
    table.write(results / "runs.csv", by_cell)
    write_report(results, tmp_path / "tuning")
    page = (results / "tuning.md").read_text()
    for lr, accuracy in ((1, "0.1000"), (0.1, "0.0100")):
        assert f"| dp-ivon-gradsq | {lr} | {accuracy} | 1.0000 | used in a part of the grid |" in page
    assert "| dp-sgd | 1 | 0.1000 | 1.0000 | chosen |" in page


def test_tuning_is_composed_with_the_run_it_served(results):
    row = next(r for r in table.read(results / "runs.csv") if r["method"] == "dp-sgd")
    mine = [r for r in tuned(lambda *a: 0.5) if r["method"] == "dp-sgd"]
    spent = [(row["noise_multiplier"], 512 / 50_000, 100)]
    spent += [(r["noise_multiplier"], 512 / 45_000, 50) for r in mine]
    assert epsilon_with_tuning(row, tuned(lambda *a: 0.5)) == epsilon(spent, 1e-5, "rdp")
    assert epsilon_with_tuning(row, []) == epsilon(spent[:1], 1e-5, "rdp")


def test_the_winner_is_best_on_average_and_a_divergence_loses(tmp_path):
    def accuracy(method, lr, sigma):
        if method == IVON:
            return math.nan if (lr, sigma) == (1.0, 5.0) else 0.1 if lr == 0.1 else 0.9
        return {(0.1, 1.0): 0.5, (0.1, 5.0): 0.3, (1.0, 1.0): 0.6, (1.0, 5.0): 0.1}[lr, sigma]

    table.write(tmp_path / "tuning.csv", tuned(accuracy))
    assert [c.lr for c in candidates(tuned(accuracy))["dp-sgd"]] == [0.1, 1.0]
    done = invoke("study", "pick", tmp_path, "--to", tmp_path / "lr.json")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "lr.json").read_text())["lr"] == {"dp-sgd": 0.1, IVON: 0.1}
    assert "dp-sgd: 0.1, of 0.1 (0.400), 1 (0.350)" in done.stdout
    table.write(tmp_path / "tuning.csv", tuned(accuracy)[:-1])
    with pytest.raises(ArgumentError, match="not all run"):
        pick(tmp_path, tmp_path / "lr.json")
    with pytest.raises(ArgumentError, match=r"holds no tuning\.csv"):
        pick(tmp_path / "none", tmp_path / "lr.json")


def test_commands(tmp_path):
    study = tmp_path / "s.yaml"
    study.write_text(
        "{name: s, dataset: digits, network: small, epochs: 1, delta: 1e-4, mc_samples: 2, split: tuning,"
        " grid: {batch_size: [256], noise_multiplier: [1], max_grad_norm: [1]}, methods: [{method: dp-sgd, lr: 0.1}]}"
    )
    done = invoke("study", "resolve", study, tmp_path / "plan.json")
    assert "1 runs of 1 epochs" in done.stdout
    out = tmp_path / "out"
    stopped = invoke("study", "run", tmp_path / "plan.json", "--out", out, "--minutes", "1e-9", "--block", "1", "-q")
    assert stopped.exit_code == 75
    assert "0 of 1 runs finished" in stopped.stdout
    assert "under way" in invoke("study", "status", out).stdout
    finished = invoke("study", "run", study, "--out", out, "-q", "--keep")
    assert finished.exit_code == 0, finished.output
    rows = table.read(out / "tuning.csv")
    assert [(r["split"], r["train_size"]) for r in rows] == [("tuning", 1297)]
    assert len(list((out / "posteriors").iterdir())) == 1
    for command in (
        ("report", out),
        ("status", tmp_path),
        ("run", study, "--out", out, "--stack", "0"),
    ):
        refused = invoke("study", *command)
        assert refused.exit_code == 2
        assert refused.stderr.startswith("error: ")
        assert refused.stderr.count("\n") == 1
    assert "imagenet" in invoke("data", "fetch", "imagenet", "--to", tmp_path).stderr


def test_plan_of_an_empty_study_is_refused():
    with pytest.raises(ArgumentError, match="nothing to run"):
        Plan("a", "digits", "small", "final", 1, 1e-5, 1, 0, ())


def test_variants_are_rows_of_their_own(results):
    made = [r for r in table.read(results / "runs.csv") if r["method"] == IVON]
    table.write(results / "runs.csv", made + [r | {"options": '{"ess": 500.0}', "id": "x" + r["id"]} for r in made])
    assert [p.name for p in write_report(results)][-1] == "summary.csv"
    assert len(table.read(results / "summary.csv")) == 8


def test_the_tuning_beside_a_study_goes_with_it(results):
    beside = results.with_name(f"{results.name}-tuning")
    beside.mkdir()
    with pytest.raises(ArgumentError, match="holds no tuning"):
        write_report(results, tuning=beside)
    table.write(beside / "tuning.csv", tuned(lambda method, lr, sigma: lr))
    assert [p.name for p in write_report(results)][-1] == "tuning.md"
