"""Every Python snippet of the README runs, in order, in an empty directory, and says what the text says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_snippets_run_and_learn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    for snippet in re.findall(r"```python\n(.*?)```", README, flags=re.S):
        exec(compile(snippet, "README.md", "exec"), names)
    spent = float(re.search(r"spent epsilon = ([\d.]+)", capsys.readouterr().out).group(1))
    assert 7.9 < spent <= 8.0
    assert (names["prediction"].label == names["test_y"]).float().mean() > 0.5
    assert names["plan"].epsilon == pytest.approx(8.594, abs=0.01)
    assert (tmp_path / "posterior.safetensors").exists()


def test_the_table_is_what_the_demo_prints():
    """Epsilon to three digits from the README against a fresh calculation; the rest is in the demo's own tests."""
    from dpivon import budget

    plan = budget(dataset_size=1297, batch_size=256, epochs=40, delta=1e-4, target_epsilon=4.0)
    assert f"{plan.epsilon:.3f}" in README


def test_links_point_to_files_that_exist():
    for target in re.findall(r"\]\(((?!http)[^)]+)\)", README):
        assert (Path(__file__).parents[1] / target).exists(), target
