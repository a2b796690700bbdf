"""The matrix as a table: ``python tests/attack/table.py`` writes it into docs/threat-model.md, between its markers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from all_cases import CASES
from attack_case import PATHS
from attack_ranks import RANKS_OF_THE_MATRIX, judge_anywhere
from harness import Verdict

PAGE = Path(__file__).parents[2] / "docs" / "threat-model.md"
BEGIN, END = "<!-- attack matrix: begin -->", "<!-- attack matrix: end -->"


def markdown(judged: Callable[[str, str], Verdict]) -> str:
    """One row per case, one column per path; refusals are numbered, and their sentences follow."""
    sentences: dict[str, int] = {}
    lines = [f"| case | row | {' | '.join(PATHS)} |", "|---" * (2 + len(PATHS)) + "|"]
    kinds = []
    for name, case in CASES.items():
        cells = []
        for path in PATHS:
            verdict = judged(name, path)
            kinds.append(verdict.kind)
            cells.append(_cell(verdict, sentences))
        lines.append(f"| {_plain(name)} | {case.row} | {' | '.join(cells)} |")
    tried = [kind for kind in kinds if kind != "—"]
    counted = ", ".join(f"{tried.count(kind)} {kind}" for kind in sorted(set(tried), key=tried.count, reverse=True))
    head = f"{len(CASES)} cases on {len(PATHS)} paths: {counted}; — where a path has no such thing."
    notes = [f"{number}. {_plain(sentence)}" for sentence, number in sentences.items()]
    return "\n".join([head, "", *lines, "", "What a refusal says, by its number:", "", *notes]).strip()


def _cell(verdict: Verdict, sentences: dict[str, int]) -> str:
    if verdict.kind in ("right", "—"):
        return verdict.kind
    if verdict.kind in ("refused", "torch refuses"):
        return f"{verdict.kind} ({sentences.setdefault(_steady(verdict.text), len(sentences) + 1)})"
    return f"**{verdict}**".replace("|", "\\|")


def _steady(sentence: str) -> str:
    """Without what differs from one process to the next."""
    return re.sub(r"0x[0-9a-f]{6,}", "0x…", sentence)


def _plain(text: str) -> str:
    """As Markdown shows it literally."""
    return re.sub(r"([|<>*_\[\]])", r"\\\1", " ".join(text.split()))


def section(page: str) -> str:
    """What stands between the markers."""
    if BEGIN not in page or END not in page:
        raise SystemExit(f"{PAGE}: has no lines {BEGIN} and {END}. Add them where the table belongs.")
    return page.split(BEGIN)[1].split(END)[0].strip()


def main() -> int:
    torch.set_num_threads(1)
    page = PAGE.read_text(encoding="utf-8")
    before = section(page)
    verdicts: dict[tuple[str, str], Verdict] = {}

    def judged(name: str, path: str) -> Verdict:
        verdicts[name, path] = verdict = judge_anywhere(name, path)
        return verdict

    try:
        table = markdown(judged)
    finally:
        RANKS_OF_THE_MATRIX.stop()
    PAGE.write_text(
        page.replace(f"{BEGIN}{page.split(BEGIN)[1].split(END)[0]}{END}", f"{BEGIN}\n{table}\n{END}"), "utf-8"
    )
    bad = {place: verdict for place, verdict in verdicts.items() if not verdict.good}
    for (name, path), verdict in bad.items():
        print(f"{name} | {path} | {verdict}")
    print(f"{len(bad)} failures; the table is {'the same' if table == before else 'new'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
