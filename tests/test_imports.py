"""What an import does not bring with it, seen by one process that imports one thing after the other."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_IMPORTS = """
import json, sys
def imported(): return sorted({name.split(".")[0] for name in sys.modules})
import dpivon, dpivon.metrics
first = imported()
import dpivon.integrations, dpivon.integrations.tracking, dpivon.integrations.sklearn
print(json.dumps([first, imported()]))
"""


@pytest.fixture(scope="module")
def imported() -> list[set[str]]:
    """Packages that are there after dpivon and its metrics, and after its integrations."""
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True)
    return [set(names) for names in json.loads(done.stdout)]


def test_importing_metrics_does_not_import_torchmetrics(imported: list[set[str]]) -> None:
    assert "torch" in imported[0]
    assert not {"torchmetrics", "sklearn"} & imported[0]


def test_importing_dpivon_imports_none_of_its_integrations(imported: list[set[str]]) -> None:
    assert "sklearn" in imported[1]
    assert not {"lightning", "pytorch_lightning", "tensorboard", "mlflow", "transformers", "peft"} & imported[1]
