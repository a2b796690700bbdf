"""The snippets of docs/integrations.md run in order, its links exist, and its table names the extras that there are."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dpivon.integrations.need import pip_line

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "integrations.md").read_text()


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_the_snippets_run_and_learn(tmp_path, monkeypatch):
    pytest.importorskip("lightning.pytorch", reason=pip_line("lightning"))
    pytest.importorskip("tensorboard", reason=pip_line("tensorboard"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", TEXT, flags=re.S):
        exec(compile(snippet, "integrations.md", "exec"), names)
    assert names["classifier"].epsilon_ <= 8.0
    assert names["classifier"].score(names["x"][1400:], names["y"][1400:]) > 0.6
    assert names["private"].epsilon <= 8.0
    assert any((tmp_path / "runs").iterdir())


def test_links_point_to_files_that_exist():
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target


def test_every_extra_of_an_integration_is_named():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in extras.keys() - {"dev", "fuzz"}:  # those two are for working on the library
        assert f"| `{pip_line(extra)}` |" in TEXT, extra
