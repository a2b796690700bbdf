"""The measured numbers of benchmarks: functions for the marks of :mod:`experiments.numbers`."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]


def file(path: str, keys: str, form: str, factor: str = "1") -> str:
    """One number of a JSON file: ``keys`` lead to it, separated by slashes, with underscores for spaces."""
    found = json.loads((ROOT / path).read_text())
    for key in keys.split("/"):
        found = found[int(key) if isinstance(found, list) else key if key in found else key.replace("_", " ")]
    return format(float(factor) * found, form)


def step(name: str, row: str, key: str, form: str) -> str:
    """One number of a benchmark of steps."""
    return file(f"benchmarks/results/step-{name}.json", f"rows/{row}/{key}", form)


MARKS = (file, step)
