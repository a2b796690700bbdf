"""A whole run on a table, shared by the tests of a file, and runs without their report."""

from __future__ import annotations

from typing import Any

import pytest

from clinic import clinic
from dpivon.train import run as running
from dpivon.train import train
from dpivon.train.config import resolve


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has tests of its own."""
    monkeypatch.setattr(running, "_report", lambda folder, watcher: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run with a seed that nothing interrupted: its options and its summary."""
    folder = tmp_path_factory.mktemp("whole")
    options = clinic(folder) | {"seed": 5, "test": str(folder / "test.csv"), "heldout": str(folder / "test.csv")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "_report", lambda folder, watcher: None)
        return options, train(resolve(options))
