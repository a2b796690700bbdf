"""The snippets of docs/methods.md run, its links exist, and its tables name every method of the registry."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from dpivon.methods import METHODS

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "methods.md").read_text()


def test_the_snippets_run_and_learn(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", TEXT, flags=re.S):
        exec(compile(snippet, "methods.md", "exec"), names)
    assert names["engine"].get_epsilon(1e-4) <= 8.0
    assert (names["prediction"].label == names["digits"].test.y).float().mean() > 0.4
    assert names["ensemble"].epsilon(1e-4) <= 8.0
    assert (tmp_path / "posterior.safetensors").exists()


def test_links_point_to_files_that_exist() -> None:
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", TEXT):
        assert (DOCS / target).exists(), target


def test_the_tables_say_what_the_registry_says() -> None:
    lines = TEXT.splitlines()
    for m in METHODS.values():
        assert f"| `{m.name}` | {m.optimises} | {m.posterior} | {m.predicts} | {m.reference} |" in lines
        assert any(line.startswith(f"| `{m.name}` |") and line.endswith(f"| {m.choose} |") for line in lines), m.name


def test_the_costs_are_those_that_were_measured() -> None:
    measured = json.loads((DOCS.parent / "results" / "benchmarks" / "methods-cpu.json").read_text())["rows"]
    for name, row in measured.items():
        if name in METHODS:
            assert f"| `{name}` | {row['time']:.2f} | {row['memory']:.2f} | {row['floats']:.0f} |" in TEXT, name
