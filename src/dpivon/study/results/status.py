"""What of a study is finished, what is under way, and what each stack is doing now."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from pathlib import Path

from dpivon.durable.files import replace
from dpivon.durable.ledger import read
from dpivon.errors import StorageError, bad
from dpivon.privacy.accounting.recorded import LEDGER
from dpivon.study.plan.plan import read_plan
from dpivon.study.results import table
from dpivon.study.results.folder import stacks_of

NOTE = "now.json"
_EVERY = 2.0  # seconds


class Note:
    """Kept in the stack's folder, and written no more often than people look."""

    def __init__(self, folder: Path) -> None:
        self.path, self._last = folder / NOTE, float("-inf")

    def write(self, words: str) -> None:
        if time.monotonic() - self._last >= _EVERY:
            self._last = time.monotonic()
            with contextlib.suppress(StorageError):  # no study ends for want of a note
                replace(self.path, json.dumps({"words": words, "time": time.time()}).encode())


def noted(folder: Path) -> str:
    """The last note with its age; nothing where there is none that can be read."""
    try:
        found = json.loads((folder / NOTE).read_text())
        return f"{max(0, round(time.time() - found['time']))} s ago: {found['words']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def status_lines(out: Path) -> list[str]:
    """In words, one line per method and one line per stack under way."""
    if not (out / "study.json").exists():
        raise bad("out", str(out), "holds no study", "Give the folder that `dpivon study run` wrote")
    plan = read_plan(out / "study.json")
    done = {row["id"] for row in table.read(out / plan.table)}
    planned = Counter(run.method for run in plan.runs)
    ready = Counter(run.method for run in plan.runs if run.id in done)
    lines = [f"{plan.name}: {sum(ready.values())} of {len(plan.runs)} runs finished"]
    lines += [f"  {method}: {ready[method]} of {n}" for method, n in planned.items()]
    for folder, runs in stacks_of(out):
        if not runs:
            continue
        charged = read(folder / LEDGER).releases if (folder / LEDGER).exists() else 0
        rows = sum(run in done for run in runs)
        words = f"stack {folder.name}, {len(runs)} runs, {charged} releases charged to each"
        words += f", {rows} have their rows" if rows else ""
        now = noted(folder)
        lines.append(f"  under way: {words}" + (f"; {now}" if now else ""))
    return lines
