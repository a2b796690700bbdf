"""What the tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dpivon.privacy.precision import full_precision


@pytest.fixture
def in_full_precision() -> Iterator[None]:
    """Both sides in fp32 proper: what is compared is the program, not the precision of cuDNN. Restored for the next test."""
    with full_precision():
        yield
