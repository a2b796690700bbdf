"""What an import does not bring with it, seen by one process that imports one thing after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType

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


def test_importing_dpivon_is_hardly_more_than_importing_torch(imported: list[set[str]]) -> None:
    assert "torch" in imported[0]
    heavy = {
        "opacus",
        "scipy",
        "sklearn",
        "matplotlib",
        "typer",
        "rich",
        "pydantic",
        "yaml",
        "dp_accounting",
        "torchmetrics",
    }
    assert not heavy & imported[0]


def test_names_of_functions_win_over_modules_of_the_same_name() -> None:
    import dpivon.audit
    import dpivon.fit
    import dpivon.predict

    for name in dpivon.__all__:
        assert not isinstance(getattr(dpivon, name), ModuleType), name
    with pytest.raises(AttributeError, match="nothing"):
        dpivon.nothing  # noqa: B018


def test_importing_dpivon_imports_none_of_its_integrations(imported: list[set[str]]) -> None:
    assert "sklearn" in imported[1]
    assert not {"lightning", "pytorch_lightning", "tensorboard", "mlflow", "transformers", "peft"} & imported[1]
