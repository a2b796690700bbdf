"""docs/train.md and the README: their commands parse, their schema is one, their links exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dpivon.cli import app
from dpivon.sources.schema import read_schema

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "train.md").read_text()


@pytest.mark.parametrize("text", [PAGE, (ROOT / "README.md").read_text()], ids=["page", "readme"])
def test_the_commands_are_commands(text: str) -> None:
    group: Any = get_command(app)
    found = re.findall(r"^    dpivon (train|predict) (.*)$", text, flags=re.M)
    assert {name for name, _ in found} == {"train", "predict"}
    for name, rest in found:
        group.commands[name].make_context(name, shlex.split(rest, comments=True)).close()


def test_the_schema_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(re.search(r"```yaml\n(.*?)```", PAGE, flags=re.S).group(1))
    schema = read_schema(tmp_path / "a.yaml")
    assert schema.classes == ("yes", "no")
    assert list(schema.columns) == ["age", "sex", "admitted"]
    assert list(read_schema(ROOT / "examples" / "patients.yaml").columns)[:1] == ["mean radius"]


def test_links_point_to_files_that_exist() -> None:
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
