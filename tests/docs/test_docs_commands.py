"""Commands on the pages: `dpivon …` parses, `make …` and `python -m …` exist with their options, `pytest …` has its files."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from docs_pages import PAGES, ROOT, fences, inline_code, without_fences
from typer.testing import CliRunner

from dpivon.cli import app
from dpivon.sources.schema import read_schema
from dpivon.study.plan.config import resolve

CLI = typer.main.get_command(app)
CHEAP = ("budget", "methods", "version")
STARTS = ("dpivon ", "make ", "python -m ", "pytest ")


def commands(text: str) -> dict[str, bool]:
    """Commands in shell blocks and indented blocks (True: they are whole), and in running text (False: perhaps not)."""
    blocks = [line for block in fences(text, "bash", "console", "sh") for line in block.splitlines()]
    blocks += [line for line in without_fences(text).splitlines() if line.startswith("    ")]
    lines = [(line, False) for line in inline_code(text)] + [(line, True) for line in blocks]
    stripped = ((re.sub(r"^\s*(\$ |[A-Z_]+=\S+ )*", "", line).split(" #")[0].strip(), whole) for line, whole in lines)
    return {line: whole for line, whole in stripped if line.startswith(STARTS)}


EVERY = [(page, line) for page, path in PAGES.items() for line in commands(path.read_text())]
OURS = [
    pytest.param(line, whole, id=f"{page}: {line}")
    for page, path in PAGES.items()
    for line, whole in commands(path.read_text()).items()
    if line.startswith("dpivon ")
]
RUNNABLE = sorted(
    {p.values[0] for p in OURS if p.values[0].split()[1] in CHEAP and "…" not in p.values[0] and p.values[1]}
)


def found(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and the words that are left to it."""
    command: Any = CLI  # typer may carry a click of its own, so its classes are not named here
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"no such command: {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize(("line", "whole"), OURS)
def test_a_dpivon_command_parses(line: str, whole: bool) -> None:
    sketch = "…" in line or "NAME" in line
    command, words = found(shlex.split(line.replace("…", " "))[1:])
    known = {option for p in command.params for option in (*p.opts, *p.secondary_opts)} | {"-h", "--help"}
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-[\d.]+", word):
            assert word.split("=")[0] in known, f"{word} is no option of {line}"
    if not sketch and "--help" not in words and "--version" not in words:
        try:
            command.make_context(line, list(words))
        except Exception as error:  # running text may name a command without all of its arguments
            if whole or type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError", "BadOptionUsage"):
                raise


@pytest.mark.parametrize("line", RUNNABLE)
def test_a_cheap_command_runs(line: str) -> None:
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for page, line in EVERY:
        if line.startswith("make "):
            assert line.split()[1] in targets, (page, line)


def test_modules_that_are_run_exist_and_have_the_options_named() -> None:
    for page, line in EVERY:
        if not line.startswith("python -m ") or line.split()[2] == "pytest":
            continue
        module = line.split()[2].replace(".", "/")
        places = [root / name for root in (ROOT, ROOT / "src") for name in (f"{module}.py", f"{module}/__main__.py")]
        assert any(p.exists() for p in places), (page, line)
        source = "".join(p.read_text() for p in places if p.exists())
        for option in re.findall(r"(?<=\s)--[\w-]+", line):
            assert option in source or option[2:].replace("-", "_") in source, (page, line, option)


def test_tests_that_are_named_exist() -> None:
    for page, line in EVERY:
        if line.startswith("pytest "):
            for word in line.split()[1:]:
                assert word.startswith("-") or (ROOT / word.split("::")[0]).exists(), (page, line)


SCHEMAS = "docs/train.md"  # its YAML declares tables


def test_a_schema_on_a_page_can_be_read(tmp_path: Path) -> None:
    (block,) = fences(PAGES[SCHEMAS].read_text(), "yaml")
    (tmp_path / "schema.yaml").write_text(block)
    assert set(read_schema(tmp_path / "schema.yaml").columns) == {"age", "sex", "admitted"}


@pytest.mark.parametrize(
    "page", [page for page, path in PAGES.items() if page != SCHEMAS and fences(path.read_text(), "yaml")]
)
def test_a_study_on_a_page_becomes_a_plan(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is a part of a study changes the study before it; a Python block may be the module that it names."""
    study: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    for block in fences(PAGES[page].read_text(), "python"):
        if name := re.match(r"# (\w+)\.py\n", block):
            (tmp_path / f"{name[1]}.py").write_text(block)
            monkeypatch.delitem(sys.modules, name[1], raising=False)
    for block in fences(PAGES[page].read_text(), "yaml"):
        study |= yaml.safe_load(block)
        file = tmp_path / "study.yaml"
        file.write_text(yaml.safe_dump(study))
        plan = resolve(file)
        assert {run.method for run in plan.runs} == {entry["method"] for entry in study["methods"]}
