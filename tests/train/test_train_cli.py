"""What people type: flags, JSON, quiet, drafts, predictions, completion; a mistake is one line and exit code 2."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from clinic import HEADER, as_flags, clinic, rows, write_csv
from dpivon.cli import app
from dpivon.train import load
from dpivon.train import run as running


@pytest.fixture(autouse=True)
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_report", lambda folder, watcher: None)


def invoke(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args], prog_name="dpivon")


def refused(result: Any, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: ")
    for word in words:
        assert word in result.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run made on the command line, in words."""
    folder = tmp_path_factory.mktemp("made")
    options = clinic(folder) | {"test": str(folder / "test.csv")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "_report", lambda folder, watcher: None)
        result = invoke("train", *as_flags(options))
    assert result.exit_code == 0, result.output
    return folder, result


def test_it_says_what_was_spent_assumed_and_not_chosen(made: Any) -> None:
    _, result = made
    words = " ".join(result.stdout.split())
    for text in (
        "ε = 3.99", "at δ = 0.0001", "adding or removing one example", "NOT PRIVATE", "N = 300, as declared",
        "age: 0 to 100", "sex: f, m, or another", "made up", "No mean, deviation or quantile", "No class weights",
        "No early stopping", "may be published",
    ):  # fmt: skip
        assert text in words, text
    assert "24 steps of 50 examples on average" in " ".join(result.stderr.split())


@pytest.mark.slow
def test_the_epsilon_that_is_shown_is_that_of_the_steps_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live, and not that of the last epoch: it would say less than was spent."""
    from dpivon.terminal import Bar
    from dpivon.train import display as showing
    from dpivon.train import resolve, train

    shown: list[tuple[float, float]] = []

    class Watched(Bar):
        def at(self, step: int, **fields: Any) -> None:
            self._due = 0.0
            super().at(step, **fields)
            assert self._bar is not None
            shown.append((self._bar.tasks[0].fields["epsilon"], self._epsilon()))

    monkeypatch.setattr(showing, "Bar", Watched)
    display = showing.Display(quiet=False)
    display.console.file = io.StringIO()
    train(resolve(clinic(tmp_path) | {"epochs": 2}), display)
    assert len(shown) == 14
    assert all(told == spent > 0 for told, spent in shown)


def test_json_is_the_summary_and_nothing_else_and_quiet_is_nothing(made: Any) -> None:
    folder, _ = made
    options = clinic_flags(folder)
    as_json = invoke("train", *options, "--json")
    assert as_json.exit_code == 0
    assert json.loads(as_json.stdout) == json.loads((folder / "run" / "summary.json").read_text())
    assert as_json.stderr == ""
    assert invoke("train", *options, "--quiet").output == ""


def clinic_flags(folder: Path) -> list[str]:
    return as_flags(clinic(folder) | {"test": str(folder / "test.csv")})


def test_the_same_from_a_file_and_overridden(made: Any, tmp_path: Path) -> None:
    folder, _ = made
    result = invoke("train", "--config", folder / "run" / "config.yaml", "--json")
    assert json.loads(result.stdout)["releases"] == 24
    refused(
        invoke("train", "--config", folder / "run" / "config.yaml", "--epsilon", 9), "epsilon=9.0", "begun with 4.0"
    )


@pytest.mark.slow
def test_flags_stand_for_a_schema(tmp_path: Path) -> None:
    options = clinic(tmp_path) | {"epochs": 1}
    flags = as_flags(options)
    at = flags.index("--schema")
    del flags[at : at + 2]
    flags += [
        "--target",
        "ill",
        "--classes",
        "yes,no",
        "--categories",
        "sex:f,m",
        "--bounds",
        "age:0:100",
        "--ignore",
        "note",
    ]
    refused(invoke("train", *flags), "columns='dose'", "--bounds dose:LOW:HIGH")
    result = invoke("train", *flags, "--bounds", "0:10", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "run" / "model" / "model.json").read_text())["inputs"]["columns"]
    assert told == {"age": {"min": 0, "max": 100}, "sex": {"categories": ["f", "m"]}, "dose": {"min": 0, "max": 10}}
    refused(invoke("train", *flags, "--bounds", "dose:0"), "bounds='dose:0'")
    refused(invoke("train", *flags, "--categories", "sex"), "categories='sex'")
    refused(invoke("train", *flags, "--option", "beta1"), "option='beta1'")
    refused(invoke("train", *flags, "--hidden", "many"), "hidden='many'")


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    flags = as_flags(clinic(tmp_path))
    refused(invoke("train"), "data=None", "a folder of images, a table, or arrays")
    refused(invoke("train", *flags, "--task", "ranking"), "task='ranking': is not one of")
    refused(invoke("train", *flags, "--task", "regression"), "target_bounds=None: is needed", "--target-bounds 0:500")
    refused(invoke("train", *flags, "--target-bounds", "0"), "target-bounds='0': is not LOW:HIGH")
    refused(invoke("train", *flags, "--delta", "0.1"), "1/N")
    refused(invoke("train", *flags, "--public-sample", "a.csv"), "--write-schema")
    refused(invoke("train", "nothing.csv", *flags[1:]), "nothing.csv", "does not exist")
    refused(invoke("train", tmp_path / "x.docx", *flags[1:]), "is of no kind")
    assert not (tmp_path / "run").exists()


def test_a_seed_is_warned_of(tmp_path: Path) -> None:
    result = invoke("train", *as_flags(clinic(tmp_path) | {"epochs": 1}), "--seed", 3)
    assert result.exit_code == 0
    assert "warning: seed=3: decides the privacy noise" in result.stderr
    assert "take the noise away" in " ".join(result.stdout.split())


def test_a_schema_is_drafted_from_names_and_never_from_values(tmp_path: Path) -> None:
    drafts = []
    for i, table in enumerate((rows(5), [])):
        data = write_csv(tmp_path / f"{i}.csv", table)
        assert invoke("train", data, "--target", "ill", "--write-schema", tmp_path / f"{i}.yaml").exit_code == 0
        drafts.append((tmp_path / f"{i}.yaml").read_text())
    assert drafts[0] == drafts[1]
    refused(invoke("train", tmp_path / "0.csv", "--write-schema", tmp_path / "0.yaml"), "exists")
    refused(invoke("train", tmp_path / "0.csv", "--write-schema", tmp_path / "x.yaml", "--target", "no"), "target='no'")
    again = ["--write-schema", tmp_path / "s.yaml", "--public-sample"]
    refused(invoke("train", tmp_path / "0.csv", *again, tmp_path / "0.csv"), "is the private data itself")
    sample = write_csv(tmp_path / "open.csv", rows(30, seed=9))
    assert invoke("train", tmp_path / "0.csv", "--target", "ill", *again, sample).exit_code == 0
    run = [
        "train",
        tmp_path / "0.csv",
        "--schema",
        tmp_path / "s.yaml",
        "--epsilon",
        1,
        "--delta",
        1e-3,
        "--dataset-size",
        5,
    ]
    result = invoke(*run, "--check")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("NOT PRIVATE")
    assert "5 examples" in result.stdout


def test_check_counts_what_does_not_fit(tmp_path: Path) -> None:
    options = clinic(tmp_path)
    write_csv(tmp_path / "train.csv", [[300, "x", "q", "", "no"], ["", 3, "", "", "no"], [5, 5, "f", "", "yes"]])
    lines = invoke("train", *as_flags(options), "--check").stdout.splitlines()
    assert lines == [
        "age: 1 clamped, 0 that are no numbers, 1 missing, of 3",
        "dose: 0 clamped, 1 that are no numbers, 0 missing, of 3",
        "sex: 1 other than its categories, 1 missing, of 3",
        "3 examples; N = 300 is declared",
        "does not look as declared: dose: 1 of 3 cells are no numbers",
        "does not look as declared: dataset_size: N = 300 is declared, and there are 3 examples",
    ]
    assert not (tmp_path / "run").exists()


def test_a_signal_says_that_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dpivon.train.loop import Loop

    whole_step = Loop._step

    def step(self: Loop, batch: Any) -> bool:
        went_on = whole_step(self, batch)
        if self.done == 3:
            signal.raise_signal(signal.SIGINT)
        return went_on

    flags = as_flags(clinic(tmp_path) | {"epochs": 1})
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", step)
        stopped = invoke("train", *flags)
    assert stopped.exit_code == 130
    assert "the same command goes on" in stopped.stderr
    assert json.loads(invoke("train", *flags, "--json").stdout)["releases"] == 6


def test_the_owner_is_asked_before_any_epsilon_is_spent(tmp_path: Path) -> None:
    """Semicolons and decimal commas: refused as plain CSV, then as points; declared, they train, and predict knows them."""
    options = clinic(tmp_path) | {"epochs": 1}
    table = [[f"p{i}", *row] for i, row in enumerate(rows(300))]
    text = "\n".join(";".join(str(cell).replace(".", ",") for cell in row) for row in [["who", *HEADER], *table])
    (tmp_path / "train.csv").write_text(text)
    flags = [*as_flags(options), "--id", "who"]
    refused(invoke("train", *flags), "in one piece", "State --delimiter ';'")
    stopped = invoke("train", *flags, "--delimiter", ";")
    refused(stopped, "age: 300 of 300 cells are no numbers", "declare decimal: ','", "is not private", "no ε was spent")
    tenfold = ["--dataset-size", 3000, "--delimiter", ";", "--decimal", ","]
    refused(invoke("train", *flags, *tenfold), "N = 3000 is declared, and there are 300 examples")
    assert not (tmp_path / "run").exists()
    done = invoke("train", *flags, "--delimiter", ";", "--decimal", ",", "--json")
    assert done.exit_code == 0, done.output
    assert "proceed" not in (tmp_path / "run" / "config.yaml").read_text()
    out = ["--out", tmp_path / "p.csv"]
    assert invoke("predict", tmp_path / "run", tmp_path / "train.csv", *out).exit_code == 0
    with open(tmp_path / "p.csv", newline="") as file:
        assert [line["who"] for line in csv.DictReader(file)] == [row[0] for row in table]
    (tmp_path / "abc.csv").write_text("who;age;dose;sex\n1;abc;3,5;f\n2;40,0;2,0;m\n")
    refused(invoke("predict", tmp_path / "run", tmp_path / "abc.csv", *out), "age: 1 of 2 cells are no numbers")
    both = [tmp_path / "abc.csv", tmp_path / "train.csv"]
    assert "302 predictions" in invoke("predict", tmp_path / "run", *both, *out, "--proceed").stdout


# ---- predict


def test_predictions_are_those_of_the_published_model(made: Any, tmp_path: Path) -> None:
    folder, _ = made
    unlabelled = tmp_path / "new.csv"
    with open(unlabelled, "w", newline="") as file:  # other columns, other order, no label
        csv.writer(file).writerows([["sex", "dose", "age", "more"], *([r[2], r[1], r[0], 1] for r in rows(50, seed=4))])
    out = tmp_path / "p.csv"
    result = invoke("predict", folder / "run" / "model", unlabelled, "--out", out)
    assert result.exit_code == 0, result.output
    assert "50 predictions" in result.stdout
    with open(out, newline="") as file:
        found = list(csv.DictReader(file))
    published = load(folder / "run")
    expected = published.predict(published.description.inputs.read(str(unlabelled), None).inputs)
    for i, line in enumerate(found):
        p = [float(line["p(yes)"]), float(line["p(no)"])]
        assert p == pytest.approx(expected.probs[i].tolist(), rel=1e-8)
        assert sum(p) == pytest.approx(1, abs=1e-6)
        assert line["row"] == str(i + 1)
        assert line["predicted"] == ("yes" if p[0] > p[1] else "no")
        assert float(line["entropy"]) == pytest.approx(-sum(q * math.log(q) for q in p), abs=1e-5)
        assert 0 <= float(line["mutual_information"]) <= float(line["entropy"]) + 1e-6
    at_the_mean = invoke("predict", folder / "run", unlabelled, "--out", out, "--samples", 0, "--json")
    assert json.loads(at_the_mean.stdout)["mean_mutual_information"] == 0


def test_predict_refuses_what_it_cannot_use(made: Any, tmp_path: Path) -> None:
    folder, _ = made
    out = ["--out", tmp_path / "p.csv"]
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3)))
    write_csv(tmp_path / "few.csv", [])
    refused(invoke("predict", tmp_path, folder / "test.csv", *out), "holds no published model")
    refused(invoke("predict", folder / "run", tmp_path / "a.npz", *out), "is of the kind array")
    refused(invoke("predict", folder / "run", tmp_path / "few.csv", *out), "holds no examples")
    refused(invoke("predict", folder / "run", folder / "test.csv", "--samples", -1), "samples=-1")
    refused(
        invoke("predict", folder / "run", folder / "test.csv", "--out", tmp_path / "no" / "p.csv"), "does not exist"
    )
    (tmp_path / "short.csv").write_text(",".join(HEADER[1:]) + "\n1,f,,no\n")
    refused(invoke("predict", folder / "run", tmp_path / "short.csv", *out), "has no column 'age'")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").touch()
    refused(invoke("predict", tmp_path / "begun", folder / "test.csv", *out), "not finished", "dpivon train")
    assert not (tmp_path / "p.csv").exists()


def test_a_place_that_cannot_be_written_is_one_line(made: Any, tmp_path: Path) -> None:
    """In /proc not even root makes a file."""
    folder, _ = made
    options = clinic(tmp_path) | {"out": "/proc/run"}
    refused(invoke("train", *as_flags(options)), "/proc/run")
    refused(invoke("train", options["data"], "--target", "ill", "--write-schema", "/proc/s.yaml"), "/proc/s.yaml")
    refused(invoke("predict", folder / "run", folder / "test.csv", "--out", "/proc/p.csv"), "/proc/p.csv")
    for command in (("export", folder / "run"), ("report", folder / "run"), ("audit", "--quick")):
        refused(invoke(*command, "--out", "/proc/made"), "/proc/")


# ---- every command


def commands() -> list[list[str]]:
    groups = {g.name: g.typer_instance for g in app.registered_groups}
    single = [[c.name or c.callback.__name__] for c in app.registered_commands]
    return single + [[name, c.name or c.callback.__name__] for name, g in groups.items() for c in g.registered_commands]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_has_an_example_in_its_help(command: list[str]) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command, "--help"], prog_name="dpivon")
    assert result.exit_code == 0
    assert f"Example: dpivon {' '.join(command)}" in result.stdout


def test_brackets_in_a_help_are_no_markup() -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["study", "run", "--help"], prog_name="dpivon")
    assert "(dpivon[ray])" in result.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("dpivon tr", "train"), ("dpivon train --method dp-iv", "dp-ivon-gradsq"), ("dpivon le", "ledger")],
)
def test_the_shell_completes(typed: str, offered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "_DPIVON_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
    }.items():
        monkeypatch.setenv(name, value)
    assert offered in invoke().stdout.split()


def test_every_option_of_the_configuration_is_a_flag() -> None:
    from typer.main import get_command

    from dpivon.train import Config

    group: Any = get_command(app)
    flags = {parameter.name for parameter in group.commands["train"].params}
    by_another_name = {"columns": {"bounds", "categories"}, "value_bounds": {"bounds"}, "options": {"option"}}
    for name in Config.model_fields:
        assert by_another_name.get(name, {name}) <= flags


def test_an_examples_flags_are_all_known() -> None:
    """The examples in the help of train and predict parse: a renamed flag would break them."""
    import shlex

    from typer.main import get_command

    group: Any = get_command(app)
    for name in ("train", "predict"):
        command = group.commands[name]
        examples = [line.strip() for line in (command.help or "").splitlines() if line.strip().startswith("Example: ")]
        assert len(examples) >= 2
        for line in examples:
            words = shlex.split(line.removeprefix(f"Example: dpivon {name} "))
            command.make_context(name, words, resilient_parsing=False).close()


@pytest.mark.slow
def test_from_a_shell_a_mistake_is_a_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dpivon", "train", "none.csv", *as_flags(clinic(tmp_path))[1:]]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
