"""Writes the table of docs/transformers.md from a run of the campaign.

pytest -m '' tests/integrations/test_huggingface.py tests/integrations/test_compiled_transformers.py --junitxml=campaign.xml
python tests/integrations/transformers_page.py campaign.xml
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
BEGIN, END = "<!-- models: begin -->\n", "<!-- models: end -->\n"
TUNINGS = ("all", "head and last block", "LoRA", "DoRA")


def captured(report: Path) -> dict[str, str]:
    """Of each architecture, whether engine.compile records it."""
    paths: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for case in ET.parse(report).getroot().iter("testcase"):
        match = re.fullmatch(r"test_a_stock_model.*\[(\w+)-.*-(.*?)\]", case.get("name", ""))
        for p in case.iter("property") if match is not None else ():
            paths[match[1]][match[2]].append(p.get("value") == "captured")
    cells = {}
    for name, found in paths.items():
        whole = [tuning for tuning, answers in found.items() if all(answers)]
        some = any(any(answers) for answers in found.values())
        cells[name] = "yes" if len(whole) == len(found) else ", ".join(whole) or ("partly" if some else "no")
    return cells


def table(report: Path) -> str:
    found: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    alone: dict[str, set[str]] = defaultdict(set)
    for case in ET.parse(report).getroot().iter("testcase"):
        match = re.fullmatch(r"test_clipped_sums.*\[(\w+)-(.*)-(.*?)\]", case.get("name", ""))
        if match is None or case.find("skipped") is not None:
            continue
        name, task, tuning = match.groups()
        failure = case.find("failure")
        found[name][task, tuning] = "yes" if failure is None else failure.get("message", "").split("\n")[0]
        if tuning != "DoRA":  # whose layers always do
            kinds = [p.get("value", "") for p in case.iter("property") if p.get("name") == "alone"]
            alone[name].update(*(kind.split() for kind in kinds))
    from test_huggingface import REFUSED

    for name, tuning in REFUSED:
        found[name]["causal LM", tuning] = "refused"
    by_compile = captured(report)
    head = "| model | tasks | " + " | ".join(TUNINGS) + " | captured | runs example by example |"
    lines = [head, "|---" * 8 + "|"]
    for name, cases in found.items():
        tasks = ", ".join(dict.fromkeys(task for task, _ in cases))
        answers = [{cases[key] for key in cases if key[1] == tuning} for tuning in TUNINGS]
        cells = ["yes" if answer == {"yes"} else "refused" for answer in answers]
        slow = ", ".join(f"`{kind}`" for kind in sorted(alone[name])) or "–"
        lines.append(f"| {name} | {tasks} | {' | '.join(cells)} | {by_compile[name]} | {slow} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + table(Path(sys.argv[1])) + END + rest.split(END)[1])
