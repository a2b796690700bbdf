"""How many bad inputs were tried and refused: ``python tests/count_bad_input.py --out results/reliability/bad-input.json``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
FILES = (
    "privacy/test_bad_input.py",
    "privacy/accounting/test_accounting_bad_input.py",
    "privacy/test_losses.py",
    "test_bad_input_everywhere.py",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        files = [str(HERE / name) for name in FILES]
        subprocess.run([sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *files], check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    tried: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for case in cases:
        if case.find("skipped") is not None:  # the case does not exist in that mode
            continue
        name = str(case.get("classname")).split(".")[-1]
        tried[name] += 1
        refused[name] += case.find("failure") is None and case.find("error") is None
    found = {
        "command": "python tests/count_bad_input.py",
        "what": "one a test case: a bad input refused in one sentence with nothing changed, or its good neighbour accepted",
        "files": {name: {"tried": tried[name], "as it must be": refused[name]} for name in tried},
        "total": {"tried": sum(tried.values()), "as it must be": sum(refused.values())},
    }
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found["total"]))
    return 0 if tried == refused else 1


if __name__ == "__main__":
    sys.exit(main())
