"""One trained run for all tests of this folder, whose ε is computed once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from report_run import make_run

from dpivon.report import privacy


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session", autouse=True)
def _epsilons_are_computed_once() -> Iterator[None]:
    """PLD takes a second or two, and nearly all pages are of the same ledger."""
    real, known = privacy.epsilons, {}

    def remembered(rows, delta):
        key = (tuple(map(tuple, rows)), delta)
        if key not in known:
            known[key] = real(rows, delta)
        return dict(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(privacy, "epsilons", remembered)
        yield
