"""A list of what must hold, each row with the tests that show it: they are run once, and counted row by row.

A test is ``file::test`` with all its cases, or those whose name begins so. A row of which a test did not run is an error.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).parent
Rows = Mapping[str, Sequence[str]]


def main(rows: Rows, command: str, what: str, whole: Sequence[str] = ()) -> int:
    """Run the tests of the rows, and all of the files in ``whole``; counts to the file that ``--out`` names."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    wanted = {test.split("[")[0] for tests in rows.values() for test in tests}
    outcome = run([*whole, *sorted(test for test in wanted if test.split("::")[0] not in whole)])
    counts = {row: count(outcome, tests) for row, tests in rows.items()}
    unseen = [row for row, found in counts.items() if not found["tried"] or found["tried"] != found["survived"]]
    found = {
        "command": command,
        "what": what,
        "tried": len(outcome),
        "survived": sum(outcome.values()),
        "failed": sorted(name for name, passed in outcome.items() if not passed),
        "rows": counts,
    }
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{found['survived']} of {found['tried']}", *unseen, sep="\n")
    return 0 if all(outcome.values()) and not unseen else 1


def run(tests: Sequence[str]) -> dict[str, bool]:
    """Whether each case passed, by ``file::case``. One that is skipped does not exist."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        subprocess.run([*command, *(str(HERE / test) for test in tests)], check=False, cwd=HERE.parent)
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcome: dict[str, bool] = {}
    for case in cases:
        if case.find("skipped") is None:
            path = str(case.get("classname")).removeprefix("tests.").replace(".", "/") + ".py"
            name = re.sub(
                r"\\u([0-9a-f]{4})", lambda m: chr(int(m[1], 16)), str(case.get("name"))
            )  # as pytest writes σ
            outcome[f"{path}::{name}"] = case.find("failure") is None and case.find("error") is None
    return outcome


def count(outcome: Mapping[str, bool], tests: Sequence[str]) -> dict[str, Any]:
    """The cases of these tests; each of the tests has to have one."""
    cases = {test: [name for name in outcome if _is_of(name, test)] for test in tests}
    missing = [test for test, names in cases.items() if not names]
    every = {name for names in cases.values() for name in names}
    found: dict[str, Any] = {"tried": len(every), "survived": sum(outcome[name] for name in every)}
    return found | {"tests": list(tests)} | ({"tried": 0, "missing": missing} if missing else {})


def _is_of(name: str, test: str) -> bool:
    if "::" not in test:
        return name.startswith(f"{test}::")
    return name.startswith(test) if "[" in test else name.split("[")[0] == test
