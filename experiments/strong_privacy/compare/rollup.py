"""The bars in short: one line per bar and where it is asked for, met only where every part of it is."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.strong_privacy.compare.scopes import TITLES
from experiments.strong_privacy.compare.verdict import MET, NOT_COUNTED, NOT_MEASURED, NOT_MET, Bar

NAMES = {"1": "accuracy", "2": "calibration", "3": "the paper's own setting", "4": "small-model leaderboard"}
OTHER_DATA = "other data: "
_NO_PARTS = ("1d", "2d")  # counted or told, not asked for


def rollup(bars: Sequence[Bar]) -> list[tuple[str, str, str]]:
    """(bar, where, verdict), in order. Fashion-MNIST, of which exploratory runs saw a part, is a bar of its own."""
    groups: dict[tuple[str, str], list[Bar]] = {}
    for bar in bars:
        if bar.number not in _NO_PARTS:
            groups.setdefault((bar.number[0], bar.scope), []).append(bar)
    out = []
    for (number, scope), members in groups.items():
        held = scope == TITLES["fashion-mnist"]
        name = f"5. {OTHER_DATA}{NAMES[number]}" if held else f"{number}. {NAMES[number]}"
        out.append((name, scope, _together(members)))
    return sorted(out, key=lambda line: line[0])


def _together(bars: Sequence[Bar]) -> str:
    failed = [bar.number for bar in bars if bar.fails]
    unknown = [bar.number for bar in bars if bar.verdict == NOT_MEASURED]
    if len(unknown) == len(bars):
        return NOT_MEASURED
    if failed:
        return f"{NOT_MET} ({_listed(failed)})"
    if any(bar.verdict.startswith(NOT_COUNTED) for bar in bars):
        return f"{NOT_COUNTED}: accuracy does not hold"
    chance = ", within chance" if any("chance" in bar.verdict for bar in bars) else ""
    partly = " where measured" if unknown or any("where measured" in bar.verdict for bar in bars) else ""
    lacking = f" (not {_listed(unknown)})" if unknown else ""
    return f"{MET}{partly}{lacking}{chance}"


def _listed(numbers: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(numbers))
