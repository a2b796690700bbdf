"""The threat model names a test for what it says: each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
