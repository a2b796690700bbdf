"""Rows say which code made them, and rows of different code are not compared in silence."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from tiny_study import FAST, PLAN

from dpivon.errors import ArgumentError
from dpivon.study.plan.data import load_data
from dpivon.study.plan.plan import PlannedRun
from dpivon.study.results import table
from dpivon.study.results.table import check_code
from dpivon.study.run.progress import Progress
from dpivon.study.run.work import Work

ROOT = Path(__file__).parents[2]


def test_rows_of_one_code_name_its_commit() -> None:
    rows = [{"commit": "abc", "code": "1"}, {"commit": "abc", "code": "1"}]
    assert check_code(rows) == "Commit abc."


def test_equal_code_of_two_commits_may_be_compared() -> None:
    assert check_code([{"commit": "abc", "code": "1"}, {"commit": "def", "code": "1"}])


@pytest.mark.parametrize("rows", [
    [{"commit": "abc", "code": "1"}, {"commit": "abc+changes", "code": "2"}],
    [{"commit": "abc", "code": ""}, {"commit": "def", "code": ""}],
    [{"commit": "abc", "code": "1"}, {}],
])  # fmt: skip
def test_rows_of_different_code_are_refused_unless_allowed_and_then_named(rows: list[dict[str, str]]) -> None:
    with pytest.raises(ArgumentError, match=r"abc.*different code.*--mixed-code"):
        check_code(rows)
    said = check_code(rows, mixed=True)
    assert said.startswith("**Rows of different code")
    assert "abc (1)" in said


def test_the_commit_is_gits_and_says_whether_sources_were_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    monkeypatch.delenv(table.COMMIT, raising=False)
    table.commit.cache_clear()
    if head:
        assert head.startswith(table.commit().removesuffix("+changes"))
    table.commit.cache_clear()
    monkeypatch.setenv(table.COMMIT, "copied")  # also into a checkout of something else
    assert table.commit() == "copied"
    monkeypatch.setattr(table, "_git", lambda *_: "")
    monkeypatch.delenv(table.COMMIT)
    table.commit.cache_clear()
    assert table.commit() == table.UNKNOWN
    table.commit.cache_clear()


def test_the_digest_follows_a_source_that_makes_numbers_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*table._FILES, *(f"{folder}/a.py" for folder in table._NUMBERS), "report/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
        assert name.startswith("report") or (table._PACKAGE / name).parent.is_dir()
    monkeypatch.setattr(table, "_PACKAGE", tmp_path)

    def digest() -> str:
        table.code.cache_clear()
        return table.code()

    first = digest()
    (tmp_path / "report" / "a.py").write_text("x = 2\n")
    assert digest() == first
    (tmp_path / "optim" / "a.py").write_text("x = 2\n")
    assert digest() != first
    table.code.cache_clear()


def test_the_settings_of_a_row_are_those_of_its_run(tmp_path: Path) -> None:
    """A stack sorts its runs by method; a row names the release of its own."""
    runs = (PlannedRun("dp-adam", 64, 2.0, 1.0, 0, 0.01), PlannedRun("dp-sgd", 64, 1.0, 1.0, 0, 0.5))
    cpu = torch.device("cpu")
    data = load_data(PLAN, tmp_path, cpu)
    with Progress(1.0, 0.0, quiet=True) as progress:
        work = Work(PLAN, runs, tmp_path / "stack", data, FAST, cpu, progress, "one")
        assert work.stack.order == [1, 0]
        stated = {spec.noise_multiplier: spec.digest for spec in work.stack.mechanism.specs}
        assert [work.facts(i)["settings"] for i in (0, 1)] == [stated[2.0], stated[1.0]]
        work.kept.close()
