"""The snippets of docs/checkpoints.md run, in order, and leave what the page says."""

from __future__ import annotations

import re
from pathlib import Path

from dpivon.durable.ledger import read

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "checkpoints.md").read_text()


def test_the_snippets_run_and_are_charged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for snippet in re.findall(r"```python\n(.*?)```", TEXT, flags=re.S):
        exec(compile(snippet, "checkpoints.md", "exec"), names)
    assert read(tmp_path / "run" / "ledger.jsonl").releases == 20 + 10
    assert len(names["engine"].accountant) == 30
    assert len(list((tmp_path / "run").glob("release-*.safetensors"))) == 2


def test_links_point_to_files_that_exist():
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", TEXT):
        assert (DOCS / target).exists(), target
