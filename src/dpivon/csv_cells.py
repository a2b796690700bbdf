"""Cells of tables that people open in a spreadsheet."""

from __future__ import annotations

_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # the last four as Asian locales write them


def is_formula(text: str) -> bool:
    """Whether a spreadsheet would execute the text instead of showing it. A number is none."""
    if not text.startswith(_STARTS):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


def cell(text: str) -> str:
    """The text, after an apostrophe where a spreadsheet would execute it."""
    return f"'{text}" if is_formula(text) else text
