"""Fixtures of several files."""

from __future__ import annotations

import pytest
from duels import folder
from experiments.strong_privacy.compare.field import Field


@pytest.fixture
def field(tmp_path):
    """A field of made-up rows: of final studies, one a folder, and of a tuning study."""

    def make(*finals, tuned=None, plan=True, baselines=("dp-sgd", "dp-adam")):
        outs = [folder(tmp_path / f"out-{i}", rows, plan=plan) for i, rows in enumerate(finals)]
        tunings = [] if tuned is None else [folder(tmp_path / "tuning", tuned, "tuning.csv")]
        return Field(outs, tunings, "dp-steady", baselines)

    return make
