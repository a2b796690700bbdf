"""Every test that asks for ``mode`` runs with the rules of layers, and with every layer run example by example."""

from __future__ import annotations

import pytest


@pytest.fixture(params=("bookkeeping", "alone"))
def mode(request: pytest.FixtureRequest) -> str:
    return request.param
