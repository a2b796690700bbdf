"""The checks of the record hold for the library as it is, and each sees the bug that is sown for it."""

from __future__ import annotations

import pytest
from record_bugs import RecordBug, record_bugs


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("bug", record_bugs(), ids=lambda bug: bug.name)
def test_a_bug_of_the_record_is_caught(bug: RecordBug, tmp_path) -> None:
    assert bug.check(tmp_path)
    assert bug.caught()
    (again := tmp_path / "again").mkdir()
    assert bug.check(again)  # a bug must not outlive its block
