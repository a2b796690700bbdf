"""What of a study is finished and what is under way."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from dpivon.durable.ledger import read
from dpivon.errors import bad
from dpivon.privacy.accounting.recorded import LEDGER
from dpivon.study import table
from dpivon.study.note import noted
from dpivon.study.plan import read_plan


def status_lines(out: Path) -> list[str]:
    """In words, a line a method and a line a stack under way."""
    if not (out / "study.json").exists():
        raise bad("out", str(out), "holds no study", "Give the folder that `dpivon study run` wrote")
    plan = read_plan(out / "study.json")
    done = {row["id"] for row in table.read(out / plan.table)}
    planned = Counter(run.method for run in plan.runs)
    ready = Counter(run.method for run in plan.runs if run.id in done)
    lines = [f"{plan.name}: {sum(ready.values())} of {len(plan.runs)} runs finished"]
    lines += [f"  {method}: {ready[method]} of {n}" for method, n in planned.items()]
    stacks = out / "stacks"
    for folder in sorted(stacks.iterdir()) if stacks.exists() else ():
        if not (folder / "runs.json").exists():
            continue
        runs = json.loads((folder / "runs.json").read_text())
        charged = read(folder / LEDGER).releases if (folder / LEDGER).exists() else 0
        rows = sum(run in done for run in runs)
        words = f"stack {folder.name}, {len(runs)} runs, {charged} releases charged to each"
        words += f", {rows} have their rows" if rows else ""
        now = noted(folder)
        lines.append(f"  under way: {words}" + (f"; {now}" if now else ""))
    return lines
