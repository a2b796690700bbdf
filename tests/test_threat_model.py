"""The threat model names a test for what it says: each of them exists. And the page of what was tried is that of its counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from count_bad_input import ROWS
from faults.fault_tests import ROWS as FAULT_ROWS
from reliability_page import FAULTS, build

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"tests/[\w/]+(?:\.py)?(?:::\w+)?", PAGE)))


@pytest.mark.parametrize("name", NAMED)
def test_what_is_named_exists(name):
    file, _, function = name.partition("::")
    assert (ROOT / file).exists()
    assert not function or f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")


def test_every_section_names_one_or_says_that_nothing_is_tested():
    sections = PAGE.split("\n## ")[1:]
    silent = [s.splitlines()[0] for s in sections if "tests/" not in s and "untested" not in s and "`make " not in s]
    assert silent == []


def test_its_make_targets_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"`make ([\w-]+)`", PAGE)) <= set(targets)


def test_the_page_of_results_is_that_of_its_counts():
    assert (ROOT / "tests" / "reliability" / "README.md").read_text(encoding="utf-8") == build()


def test_every_row_of_both_lists_names_what_exists():
    assert all(rows for _, _, rows in FAULTS)
    for tests in (ROWS | FAULT_ROWS).values():
        assert tests
        for test in tests:
            file, _, function = test.split("[")[0].partition("::")
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert not function or f"def {function}(" in text, test
