"""Every script in examples/ runs as it stands, in an empty directory, and learns within its budget."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from dpivon.errors import pip_line

EXAMPLES = Path(__file__).parents[2] / "examples"

# script, arguments, the package it needs, its extra, accuracy that chance would not reach
RUNS = [
    ("sklearn_breast_cancer.py", [], "sklearn", "dev", 0.80),
    ("train_patients.py", [], "sklearn", "dev", 0.85),
    pytest.param("train_digit_images.py", [], "sklearn", "dev", 0.70, marks=pytest.mark.slow),
    ("lightning_digits.py", [], "lightning.pytorch", "lightning", 0.5),
    ("tensorboard_digits.py", [], "tensorboard", "tensorboard", 0.4),
    ("tensorboard_digits.py", ["--mlflow"], "mlflow", "mlflow", 0.4),
    ("huggingface_lora.py", [], "peft", "huggingface", 0.7),
    ("huggingface_trainer.py", [], "peft", "huggingface", 0.7),
]


@pytest.mark.campaign(keep=1)
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.parametrize(("script", "arguments", "package", "extra", "accuracy"), RUNS)
def test_it_runs_and_learns(script, arguments, package, extra, accuracy, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    pytest.importorskip(package, reason=pip_line(extra))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    out = capsys.readouterr().out
    assert float(re.search(r"epsilon = ([\d.]+)", out).group(1)) <= 8.0
    assert float(re.findall(r"accuracy .*?(0\.\d+|1\.00)", out)[-1]) > accuracy
    if package in ("tensorboard", "mlflow"):
        assert any((tmp_path / ("mlruns" if arguments else "runs")).iterdir())


def test_none_is_left_out():
    scripts = {run.values[0] if isinstance(run, type(pytest.param())) else run[0] for run in RUNS}
    elsewhere = {"ddp.py"}  # tests/distributed/test_example.py starts it on several processes
    assert scripts | elsewhere == {path.name for path in EXAMPLES.glob("*.py")}
