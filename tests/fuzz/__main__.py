"""Count what fuzzing did: ``python tests/fuzz --examples 2000 --out tests/reliability/fuzz.json``.

Files and configurations by random mutation; with ``--seconds`` and atheris installed, every reader by coverage as well.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from fuzz_configs import CONFIGS
from fuzz_mutations import mutate
from fuzz_readers import READERS, attempt

import dpivon


def _count(attempts: Any) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    findings: list[str] = []
    for i, call in attempts:
        try:
            outcomes[call()] += 1
        except Exception as error:
            outcomes["findings"] += 1
            findings.append(f"{i}: {type(error).__name__}: {error}"[:300])
    return dict(outcomes) | ({"first": findings[:5]} if findings else {})


def _by_coverage(name: str, seconds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(__file__).parent / "coverage_guided.py"
        command = [sys.executable, str(program), name, str(seconds), folder]
        done = subprocess.run(command, capture_output=True, text=True)
        counted = Path(folder) / "counts.json"
        counts: dict[str, Any] = json.loads(counted.read_text()) if counted.exists() else {}
    return counts if done.returncode == 0 else counts | {"findings": 1, "first": done.stderr[-600:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=0, help="of coverage-guided fuzzing, for each reader")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "command": f"python tests/fuzz --examples {given.examples} --seed {given.seed} --seconds {given.seconds}",
        "versions": {"dpivon": dpivon.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "files": {},
        "configurations": {},
        "coverage_guided": {},
    }
    with tempfile.TemporaryDirectory() as base:
        for name, reader in READERS.items():
            valid, folder = reader.valid(), Path(base) / name
            folder.mkdir()

            def one(i: int, reader: Any = reader, valid: bytes = valid, folder: Path = folder) -> str:
                return attempt(reader, mutate(valid, random.Random(i), text=reader.text), folder)

            seeds = range(given.seed, given.seed + given.examples)
            found["files"][name] = _count((i, lambda i=i, one=one: one(i)) for i in seeds)
            print(name, found["files"][name], flush=True)
    for name, (draw, go) in CONFIGS.items():
        seeds = range(given.seed, given.seed + given.examples // 10)
        found["configurations"][name] = _count((i, lambda i=i, d=draw, g=go: g(d(random.Random(i)))) for i in seeds)
        print(name, found["configurations"][name], flush=True)
    for name in READERS if given.seconds else ():
        found["coverage_guided"][name] = _by_coverage(name, given.seconds)
        print(name, found["coverage_guided"][name], flush=True)
    parts = [counts for key in ("files", "configurations", "coverage_guided") for counts in found[key].values()]
    keys = ("ok", "read", "refused", "findings")
    found["total"] = {key: sum(int(counts.get(key, 0)) for counts in parts) for key in keys}
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if found["total"]["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
