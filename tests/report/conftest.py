"""One trained run for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_run import make_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))
