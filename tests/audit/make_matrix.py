"""What ``make audit`` runs: the audit of the library as it is, then of the library with every bug sown into it.

Writes audit.json, audit.png, audit.html, mutants.json, mutants.png and AUDIT.md. Exits 1 if the sound library fails a check
or a bug passes all of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from check_bugs import check_bugs
from matrix import METHOD, Cell, judge
from mutants import mutants
from record_bugs import record_bugs
from sowing import Mutant

from dpivon.audit.page import write
from dpivon.audit.probes import probe
from dpivon.audit.run import CHECKS, Audit, audit, digits
from dpivon.audit.session import PATHS, STACK_PATHS, Finding
from dpivon.audit.tier_c import Audited, single_releases
from dpivon.stacked.run import stackable

SEEDS = (1, 2, 3)
OTHER_METHODS = ("dp-sgd", "dp-adam", "dp-psgld", "dp-bbp", "dp-mc-dropout")
SHOWN_BROKEN = ("no noise", "half the noise", "noise too small by 1.25")


def one_thread() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def sound(path: str) -> Audit:
    model, inputs, labels = digits()
    return audit(model, (inputs, labels), method=METHOD, path=path, seed=100 * PATHS.index(path))


def unbroken(task: tuple[str, str, int]) -> list[tuple[str, str, int, Finding]]:
    """Every check on the library as it is."""
    path, method, seed = task
    subject = probe(path, method).but(seed=seed)
    return [(path, method, seed, check(subject)) for check in CHECKS]


def cell(task: tuple[int, str]) -> Cell:
    return judge(mutants()[task[0]], task[1])


def bound_with_bug(name: str) -> tuple[str, Audited]:
    mutant = next(m for m in mutants() if m.name == name)
    patch: Any = mutant.paths["bookkeeping"]
    with patch():
        return name, single_releases(probe("bookkeeping", METHOD), 1.0)


def picture(rows: list[Mutant], cells: dict[tuple[str, str], Cell], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = {"A": "#0072B2", "B": "#009E73", "C": "#E69F00", "–": "#eeeeee", "missed": "#D55E00"}
    figure = Figure(figsize=(8.2, 0.235 * len(rows) + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    for i, mutant in enumerate(rows):
        for j, name in enumerate(PATHS):
            found = cells[mutant.name, name]
            mark = {"caught": found.by[:1], "does not apply": "–"}.get(found.verdict, "missed")
            axes.add_patch(_box(j, i, colours[mark]))
            axes.text(j, i, mark, ha="center", va="center", fontsize=8, color="#666666" if mark == "–" else "white")
    axes.set(xlim=(-0.5, len(PATHS) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), [m.name for m in rows], fontsize=8)
    axes.set_xticks(range(len(PATHS)), PATHS, fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("caught by tier A (deterministic), B (statistics), C (canaries);  –  does not apply", fontsize=9)
    figure.savefig(path, dpi=140)


def _box(x: int, y: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.45), 0.96, 0.9, color=colour)


def table(rows: list[Mutant], cells: dict[tuple[str, str], Cell]) -> str:
    """The matrix in words; what stands in several cells is said once, below."""
    notes: dict[str, int] = {}
    lines = ["| bug | " + " | ".join(PATHS) + " |", "|---" * (len(PATHS) + 1) + "|"]
    for mutant in rows:
        texts = []
        for path in PATHS:
            found = cells[mutant.name, path]
            if found.verdict == "does not apply":
                number = notes.setdefault(found.detail, len(notes) + 1)
                texts.append(f"– ({number})")
            else:
                texts.append(found.by if found.verdict == "caught" else "**missed**")
        lines.append(f"| **{mutant.name}**: {mutant.bug} | " + " | ".join(texts) + " |")
    lines += ["", "Does not apply:", ""] + [f"{n}. {text}" for text, n in notes.items()]
    return "\n".join(lines)


def report(audits: list[Audit], rows: list[Mutant], cells: dict[tuple[str, str], Cell], facts: dict[str, Any]) -> str:
    by_path = []
    for found in audits:
        count = Counter(cells[m.name, found.path].verdict for m in rows)
        planted = count["caught"] + count["missed"]
        bounds = {(a.attack, a.sigma): f"{a.audited:.2f} / {a.claimed:.2f}" for a in found.audited}
        shown = [bounds[attack, 1.0] for attack in ("single releases", "own model", "one training run")]
        texts = [found.path, f"{count['caught']} / {planted}", str(count["does not apply"]), *shown]
        by_path.append(f"| {' | '.join(texts)} |")
    caught = sum(c.verdict == "caught" for c in cells.values())
    planted = sum(c.verdict != "does not apply" for c in cells.values())
    return f"""# The audit, and the bugs it was tried on

Made by `make audit` ({facts["seconds"]:.0f} s on {facts["processes"]} cores, torch {torch.__version__}); the numbers are in
`audit.json` and `mutants.json`, the page for people is `audit.html`.

**{caught} of {planted} planted bugs were caught** ({len(rows)} bugs × {len(PATHS)} paths, less the cells where a bug cannot
be had).
**{facts["alarms"]} false alarms** in {facts["sound_checks"]} checks of the library as it is ({facts["sound_na"]} more did not
apply): {len(SEEDS)} seeds on every path, and five other methods.

| path | bugs caught / planted | do not apply | ε, one release | ε, canary in the network | ε, one training run |
|---|---|---|---|---|---|
{chr(10).join(by_path)}

![audited against claimed ε](audit.png)

ε is audited / claimed, at σ = 1 and δ = 1e-5; the network has 64-32-10 units and the method is dp-ivon-gradsq. The bounds are
lower bounds with confidence 1 − 1e-6 (one training run: 0.99). One below the claim proves nothing by itself: that of single
releases is close to what a correct engine gives (3.74 at σ = 1), that of one training run is weak, since its attacker
guesses from the final weights alone. At σ = 1 the single releases notice noise that is too small by 1.14×;
tier B notices 1.1 %. Claimed ε is the smallest of the library's accountants.

*captured* is the traced and padded program on a CPU. *compiled* is the step of `engine.compile`: θ, clipped sum and noise are
one recorded program, the update another. What needs a GPU (the CUDA graph itself, and the compiler's roundings) is in
`tests/gpu`. *distributed* is book-keeping on two forked processes over gloo, each with a copy of the model; the
sharded one is held to it in `tests/distributed`. Noise replayed after a resume belongs to checkpoints, and is among the
tests of faults.

## Bugs × paths

Checks are run under a bug, the one expected to see it first, until one fails; the cell names that one. *alone* is book-keeping
of layers without a rule, which run example by example. Bugs that the library's own check on made-up inputs would refuse are
sown with that check off, so that the audit has to see them.

![matrix](mutants.png)

{table(rows, cells)}

## Bugs of the record

Of accounts that are loaded and ledgers that are read, whatever path made the releases:

{chr(10).join(f"- **{name}**: {'caught' if seen else '**missed**'}" for name, seen in facts["record"].items())}

## Bugs of the checks

A careless program that the library refuses, or runs right, and what it does with the check broken:

{chr(10).join(f"- **{name}**: {seen or '**missed**'}" for name, seen in facts["checks"].items())}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("tests/reliability"))
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    begun, rows = time.perf_counter(), mutants()
    methods = [(path, m, 0) for m in OTHER_METHODS for path in PATHS if m in stackable() or path not in STACK_PATHS]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context, initializer=one_thread) as pool:
        whole = [pool.submit(sound, path) for path in PATHS]
        checked = [pool.submit(unbroken, t) for t in [(p, METHOD, s) for s in SEEDS for p in PATHS] + methods]
        judged = [pool.submit(cell, (i, path)) for i in range(len(rows)) for path in PATHS]
        bounds = [pool.submit(bound_with_bug, name) for name in SHOWN_BROKEN]
        audits = [f.result() for f in whole]
        print(*audits, sep="\n", flush=True)
        findings = [finding for f in checked for finding in f.result()]
        alarms = [f for f in findings if f[3].holds is False]
        print(f"{len(findings)} checks of the sound library, {len(alarms)} false alarms", *alarms, sep="\n", flush=True)
        cells = {(c.mutant, c.path): c for c in (f.result() for f in judged)}
        broken = [f.result() for f in bounds]
    record = {bug.name: bug.caught() for bug in record_bugs()}
    checks = {b.name: f"{b.bug}; {b.sound}, with the bug: {b.shown()}" if b.caught() else "" for b in check_bugs()}
    missed = [c for c in cells.values() if c.verdict == "missed"]
    count = Counter(c.verdict for c in cells.values())
    facts = {
        "seconds": time.perf_counter() - begun,
        "processes": options.processes,
        "alarms": len(alarms),
        "sound_checks": sum(f[3].holds is not None for f in findings),
        "sound_na": sum(f[3].holds is None for f in findings),
        "record": record,
        "checks": checks,
    }
    write(audits, options.out, broken)
    matrix = [asdict(c) for c in cells.values()]
    content = {"counts": dict(count), **facts, "bugs": {m.name: m.bug for m in rows}, "cells": matrix}
    (options.out / "mutants.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    picture(rows, cells, options.out / "mutants.png")
    (options.out / "AUDIT.md").write_text(report(audits, rows, cells, facts))
    print(
        f"{count['caught']} bugs caught, {len(missed)} missed, {count['does not apply']} cells do not apply",
        *missed,
        f"bugs of the record: {record}",
        f"bugs of the checks: {checks}",
        sep="\n",
    )
    elsewhere = all(record.values()) and all(checks.values())
    return 0 if not missed and elsewhere and not alarms and all(a.holds for a in audits) else 1


if __name__ == "__main__":
    sys.exit(main())
