"""The command line: the same numbers as the library, and one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dpivon
from dpivon.cli import app
from dpivon.demo import MARKER

RUN = ["--dataset-size", "1000", "--batch-size", "50", "--delta", "1e-5"]


def invoke(*args: str):
    return CliRunner().invoke(app, list(args), prog_name="dpivon")


def assert_refused(result, *words: str) -> None:
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_version() -> None:
    assert invoke("--version").stdout == invoke("version").stdout == f"dpivon {dpivon.__version__}\n"


@pytest.mark.parametrize("command", ["demo", "methods", "budget", "version"])
def test_help_has_an_example(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"Example: dpivon {command}" in result.stdout
    assert command in invoke("--help").stdout


@pytest.mark.parametrize(
    ("args", "keywords"),
    [
        (["--epochs", "3", "--noise-multiplier", "1.5"], {"epochs": 3, "noise_multiplier": 1.5}),
        (["--steps", "70", "--target-epsilon", "2"], {"steps": 70, "target_epsilon": 2.0}),
        (
            ["--steps", "70", "--noise-multiplier", "1", "--accountant", "prv"],
            {"steps": 70, "noise_multiplier": 1.0, "accountant": "prv"},
        ),
    ],
)
def test_budget_is_the_librarys(args: list[str], keywords: dict[str, float]) -> None:
    expected = dpivon.budget(dataset_size=1000, batch_size=50, delta=1e-5, **keywords)
    as_json = invoke("budget", *RUN, *args, "--json")
    assert as_json.exit_code == 0
    assert json.loads(as_json.stdout) == asdict(expected)
    assert invoke("budget", *RUN, *args).stdout == f"{expected}\n"


def test_budget_errors_are_one_line() -> None:
    assert_refused(invoke("budget", *RUN, "--epochs", "3"), "noise_multiplier", "Give exactly one")
    assert_refused(invoke("budget", *RUN, "--noise-multiplier", "1"), "epochs", "steps")
    both = ["--epochs", "3", "--noise-multiplier", "1", "--target-epsilon", "1"]
    assert_refused(invoke("budget", *RUN, *both), "both were given")
    wrong = ["--epochs", "3", "--noise-multiplier", "1", "--accountant", "guess"]
    assert_refused(invoke("budget", *RUN, *wrong), "accountant", "guess")


def test_a_generous_delta_is_a_warning_on_stderr_and_json_stays_json() -> None:
    args = ["--dataset-size", "100", "--batch-size", "10", "--delta", "0.1", "--steps", "5", "--noise-multiplier", "1"]
    result = invoke("budget", *args, "--json")
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: delta=0.1")
    assert json.loads(result.stdout)["delta"] == 0.1


def test_usage_errors_come_without_a_traceback() -> None:
    for args in (["budget"], ["demo", "--epochs", "many"], ["nonsense"]):
        result = invoke(*args)
        assert result.exit_code == 2
        assert "Traceback" not in result.output


def test_demo_leaves_other_peoples_folders_alone(tmp_path: Path) -> None:
    precious = tmp_path / "results.csv"
    precious.write_text("precious")
    assert_refused(invoke("demo", "--output", str(tmp_path)), "is not empty and was not written by the demo")
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]
    assert precious.read_text() == "precious"
    assert_refused(invoke("demo", "--output", str(precious)), "is a file")


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--epochs", "0"], "epochs=0"),
        (["--epsilon", "-1"], "epsilon=-1.0"),
        (["--delta", "0.01"], "1/N"),
        (["--seed", "-1"], "seed=-1"),
        (["--seed", "99999999999"], "seed=99999999999"),
    ],
)
def test_demo_refuses_bad_arguments_before_it_writes(tmp_path: Path, args: list[str], word: str) -> None:
    assert_refused(invoke("demo", "--output", str(tmp_path / "out"), *args), word)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_demo_runs_from_the_command_line_and_may_write_again(tmp_path: Path) -> None:
    (tmp_path / MARKER).touch()
    result = invoke("demo", "--output", str(tmp_path), "--epochs", "1", "--epsilon", "8")
    assert result.exit_code == 0, result.output
    for words in (
        "ε ≤ 8 at δ = 0.0001",
        "DP-IVON-Gradsq",
        "DP-Steady",
        "32 samples",
        "posterior-dp-ivon-gradsq.safetensors",
        "posterior-dp-steady.safetensors",
        "others may be better",
    ):
        assert words in " ".join(result.stdout.split())


def test_python_m_dpivon_is_the_command_and_its_errors_are_lines() -> None:
    command = [sys.executable, "-m", "dpivon", "budget", *RUN, "--epochs", "3", "--noise-multiplier", "-1"]
    # A terminal in plain ASCII must not break it either.
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONIOENCODING": "ascii"}, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: noise_multiplier=-1.0")
    assert done.stderr.count("\n") == 1


def test_methods_lists_every_method_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpivon.methods import METHODS

    monkeypatch.setenv("COLUMNS", "80")
    lines = invoke("methods").stdout.splitlines()
    assert len(lines) == 1 + len(METHODS)
    for line, method in zip(lines[1:], METHODS.values(), strict=True):
        assert line.startswith(method.name)
        assert method.summary in line


def test_methods_as_json_says_all() -> None:
    from dpivon.methods import METHODS

    listed = json.loads(invoke("methods", "--json").stdout)
    assert [m["name"] for m in listed] == list(METHODS)
    dpagd = next(m for m in listed if m["name"] == "dpagd")
    assert dpagd["defaults"]["psi"] == "square-average"
    assert {"title", "summary", "optimises", "posterior", "predicts", "choose", "reference", "lr"} <= dpagd.keys()
