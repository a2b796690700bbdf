"""Fixtures of several files."""

from __future__ import annotations

import pytest

from dpivon.study.plan.config import resolve


@pytest.fixture
def resolved(tmp_path):
    def make(text, lr=None):
        (tmp_path / "s.yaml").write_text(text)
        return resolve(tmp_path / "s.yaml", lr)

    return make
