"""Every test that asks for ``mode`` runs on each way of computing the clipped sum."""

from __future__ import annotations

import pytest

from dpivon.privacy.gradients.modes import MODES


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param
