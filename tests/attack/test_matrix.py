"""The attack matrix: every case on every path is right or refused in a clear sentence; nothing is silent."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from all_cases import CASES
from attack_case import PATHS
from attack_ranks import RANKS_OF_THE_MATRIX, judge_anywhere
from harness import Verdict, judge
from table import PAGE, markdown, section

FAST_PATHS = ("own loop", "fit")
FAST = [(name, path) for name, case in CASES.items() for path in FAST_PATHS if case.fast]
ALL = [(name, path) for name in CASES for path in PATHS]
found = cache(judge_anywhere)


@cache
def found_quickly(name: str, path: str) -> Verdict:
    return judge(CASES[name], path, quick=True)


@pytest.fixture(scope="module", autouse=True)
def _ranks_end() -> Iterator[None]:
    yield
    RANKS_OF_THE_MATRIX.stop()


def check(name: str, verdict: Verdict) -> None:
    assert verdict.good, str(verdict)
    if CASES[name].must:
        assert verdict.kind in ("right", "—"), f"every user needs this one: {verdict}"


@pytest.mark.campaign(keep=25)
@pytest.mark.parametrize(("name", "path"), FAST)
def test_a_common_case_is_right_or_refused(name: str, path: str) -> None:
    check(name, found_quickly(name, path))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "path"), ALL)
def test_a_case_is_right_or_refused(name: str, path: str) -> None:
    check(name, found(name, path))


def share_right(verdicts: list[Verdict]) -> float:
    """How much of what can be tried at all is right."""
    kinds = [v.kind for v in verdicts if v.kind != "—"]
    return kinds.count("right") / len(kinds)


@pytest.mark.slow
def test_refusing_everything_does_not_pass() -> None:
    assert share_right([found_quickly(*tried) for tried in FAST]) > 0.3  # it holds more of what must be refused


@pytest.mark.slow
def test_at_least_half_of_the_matrix_is_right() -> None:
    assert share_right([found(*tried) for tried in ALL]) >= 0.5


@pytest.mark.slow
def test_the_page_has_the_table_that_the_code_gives() -> None:
    assert section(PAGE.read_text(encoding="utf-8")) == markdown(found)


def test_the_matrix_is_large() -> None:
    assert len(CASES) >= 120
    assert sum(case.must for case in CASES.values()) >= 40
    tried = {row for case in CASES.values() for row in case.row.split(", ")}
    assert {"1", "2", "3", "4", "5", "7", "9", "10", "11", "13", "16"} <= tried  # the others are not about programs
