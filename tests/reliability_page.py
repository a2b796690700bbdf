"""``tests/reliability/README.md`` from the counts beside it: ``python tests/reliability_page.py``.

Row by row: what must hold, which tests show it, what was seen. The rows of faults are those of the fault table, and each
names the entries of ``faults.json`` and ``fault-tests.json`` that belong to it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOLDER = HERE / "reliability"
CAMPAIGN = "tests/faults/fault_campaign.py"

#: The fault table: fault, what must happen, the entries of faults.json.
FAULTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "SIGKILL at any moment, of a write too",
        "the previous checkpoint loads; the ledger holds at least every release",
        (
            "SIGKILL at a random moment of training",
            "SIGKILL at a random moment of a stack",
            "SIGKILL at a random moment of fit(out=…)",
            "SIGKILL in the middle of a write",
            "SIGKILL in the middle of a write of a stack",
        ),
    ),
    (
        "stop and resume at every step k",
        "parameters, ε and results equal to the bit (CPU)",
        ("stop and resume at every step",),
    ),
    (
        "resume after lost work",
        "replay only of bit-identical sums; else, on a device and with the cryptographic generator fresh noise, all charged",
        ("resume after lost work",),
    ),
    ("same seed set in both processes", "resumed noise is not the first's", ("same seed in both processes",)),
    (
        "truncated or bit-flipped checkpoint",
        "an error that names it; the previous one is used",
        ("bit flipped or end cut off", "truncated or bit-flipped checkpoint"),
    ),
    ("disk full", "old files intact, non-zero exit", ("disk full",)),
    ("NaN/Inf example", "contributes zero; the update is that of the data without it", ("NaN or Inf example",)),
    (
        "out of memory on a micro-batch",
        "the same logical batch retried smaller, one charge",
        ("out of memory on a micro-batch",),
    ),
    ("exception inside `sampled_params`", "mean weights restored", ("exception inside sampled_params",)),
    ("data file short or flipped", "checksum error before step 0", ("data file short or flipped",)),
    (
        "a sweep worker killed or hung",
        "the others finish; the cell reruns, or is named as failed; no duplicate rows",
        ("SIGKILL of a study", "a sweep killed", "a sweep's worker killed or hung"),
    ),
    (
        "a sweep's evaluation killed or repeated",
        "rows stay as they were written; answers are those that were lost, or new and charged; no row's ε falls",
        ("a sweep's evaluation killed or repeated",),
    ),
    (
        "a rank killed or hung",
        "all ranks end with an error; the run resumes; ε does not fall",
        ("a rank killed or hung",),
    ),
    ("two processes on one run directory", "a lock error", ("two processes on one folder", "two processes")),
    (
        "SIGTERM / Ctrl-C",
        "checkpoint written, exit 143 / 130",
        ("SIGTERM and Ctrl-C", "SIGTERM or Ctrl-C of a study"),
    ),
    ("a pickle with code in it", "refused, not executed", ("a pickle with code in it",)),
    (
        "secrets",
        "checkpoints 0600 and marked; an export has no generator, seed or gradient",
        ("a checkpoint is a secret, an export is not",),
    ),
)


def build() -> str:
    faults, tests, bad, fuzz, load, mutants = (
        json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("faults", "fault-tests", "bad-input", "fuzz", "load", "mutants")
    )
    return "\n".join(
        [
            "# Reliability: what was really tried",
            "",
            "Made by `python tests/reliability_page.py` from the JSON files beside it, which the commands below write.",
            "",
            *_faults(faults, tests),
            *_kills(faults["faults"]),
            *_bad_input(bad),
            *_fuzz(fuzz),
            *_audit(mutants),
            *_load(load),
        ]
    )


def _said(*sentences: str) -> list[str]:
    """One paragraph."""
    return [" ".join(sentences), ""]


def _faults(report: dict[str, Any], tested: dict[str, Any]) -> list[str]:
    lines = [
        "## The fault table",
        "",
        *_said(
            f"`make faults`, that is `{report['command']}` and `{tested['command']}` ·",
            f"{report['machine']}, two shared cores · `faults.json`, `fault-tests.json` ·",
            f"**{report['tried']} faults tried, {report['survived']} survived**, and {tested['survived']} of",
            f"{tested['tried']} test cases",
        ),
        "| fault | what must happen | tests | seen |",
        "|---|---|---|---|",
    ]
    for fault, what, entries in FAULTS:
        tests, seen = [], []
        for entry in entries:
            row = report["faults"].get(entry) or tested["rows"][entry]
            tests += [f"`{test}`" for test in row.get("tests", [])] or [f"`{CAMPAIGN}`: {entry}"]
            kind = "cases" if "tests" in row else entry
            seen.append(f"{row['survived']} of {row['tried']} {kind}")
        lines.append(f"| {fault} | {what} | {'<br>'.join(tests)} | {'<br>'.join(seen)} |")
    return [*lines, ""]


KILLS = (
    "SIGKILL at a random moment of training",
    "SIGKILL at a random moment of a stack",
    "SIGKILL at a random moment of fit(out=…)",
    "SIGKILL in the middle of a write",
    "SIGKILL in the middle of a write of a stack",
    "SIGKILL of a study",
)


def _kills(rows: dict[str, Any]) -> list[str]:
    lines = [
        "## When they were killed",
        "",
        *_said(
            "Random kills fall after the process's first release: at a random one of those left, and a random moment of the",
            "step after it. By tenths of the run (releases made so far); *beginning* is before its first charge, so also while",
            "it repeats what was lost:",
        ),
        "| | tried | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | while | half a file there | ended to the bit |",
        "|---" * 15 + "|",
    ]
    for name in KILLS:
        row = rows[name]
        alone = f"{name}, run by itself" if "command" in row else name
        tenths = " | ".join(map(str, row["killed_by_releases_made"]))
        phases = ", ".join(f"{what}: {n}" for what, n in sorted(row.get("killed_while", {}).items())) or "–"
        lines.append(
            f"| {alone} | {row['tried']} | {tenths} | {phases} | {row.get('half_a_file_was_there', '–')} | {_ended(row)} |"
        )
    points = rows["SIGKILL in the middle of a write"]["points"]
    flips = rows["bit flipped or end cut off"]
    found, ledgers = flips["checkpoints"], flips["ledgers"]
    lost = sum(rows[name].get("releases_lost", 0) for name in KILLS)
    each = flips["tried"] // 2
    torn = ledgers["counted_more"] + ledgers["counted_the_same"]
    return [
        *lines,
        "",
        *_said(
            f"Aimed at, {next(iter(points.values()))} times each, of a run and of a stack: {'; '.join(points)}.",
            "A charge that is half written is the one case in which the lost release cannot be repeated: it is charged,",
            f"and noise and batches are new after it. Releases lost in all: {lost}, each repeated to the bit or charged.",
            "No release was seen that the ledger lacks, and ε never fell.",
        ),
        *_said(
            f"Damage: of {each} checkpoints {found['found_and_fell_back']} were found, named, and the one before used,",
            f"{found['damage_without_effect']} had a flip in padding without effect; of {each} ledgers",
            f"{ledgers['refused']} were refused, {torn} had a torn last line, counted in full.",
            f"Full disk: {rows['disk full']['how']}.",
        ),
        *_said(
            "Read it with care. SIGKILL leaves the page cache: a power cut was not tried, and what is shown of it is that",
            "every charge is synced before it returns",
            "(`tests/durable/test_ledger.py::test_the_line_is_synced_before_the_charge_returns`). A ledger cut at a whole",
            "line *after* the newest checkpoint cannot be told from one that was never longer. All of this ran on CPUs.",
            "A test may count in two rows.",
        ),
    ]


def _ended(row: dict[str, Any]) -> str:
    if "studies" in row:
        return f"{row['studies_ended_equal']} of {row['studies']} studies"
    renewed = row["runs_ended_with_new_noise_and_more_charged"]
    return f"{row['runs_ended_bit_equal']} runs" + (f"; {renewed} with new noise, and more charged" if renewed else "")


def _bad_input(report: dict[str, Any]) -> list[str]:
    lines = [
        "## Bad input",
        "",
        *_said(
            "`make bad-input` · `bad-input.json` ·",
            f"**{report['tried']} cases, {report['survived']} as they must be**;",
            "the rows count those of their own tests, and a case may be in several",
        ),
        "| input | tests | seen |",
        "|---|---|---|",
    ]
    for row, counts in report["rows"].items():
        tests = "<br>".join(f"`{test}`" if "[" not in test else f"`{test}…]`" for test in counts["tests"])
        lines.append(f"| {row} | {tests} | {counts['survived']} of {counts['tried']} |")
    return [
        *lines,
        "",
        *_said(
            "An unknown keyword is Python's own `TypeError`, which names it. In a loop of your own torch's loss raises on a",
            "label that is no class: `dpivon.preflight` finds it before; `fit` and stacks count it for nothing.",
        ),
    ]


def _fuzz(report: dict[str, Any]) -> list[str]:
    total, guided = report["total"], report["coverage_guided"]
    runs = sum(v for counts in guided.values() for v in counts.values() if isinstance(v, int))
    taken = total["read"] + total["ok"]
    return [
        "## Fuzzing",
        "",
        *_said(
            f"`{report['command']}` · `fuzz.json` · {len(report['files'])} readers of files,",
            f"{len(report['configurations'])} kinds of configurations ·",
            f"{taken + total['refused'] + total['findings']:,} inputs,",
            f"{runs:,} of them by coverage (atheris):" if guided else "none by coverage:",
            f"{taken:,} taken, {total['refused']:,} refused by an error of ours in one line,",
            f"**{total['findings']} findings**",
        ),
    ]


def _audit(report: dict[str, Any]) -> list[str]:
    counts = report["counts"]
    planted = counts["caught"] + counts.get("missed", 0)
    return [
        "## The audit",
        "",
        *_said(
            "`make audit` · [AUDIT.md](AUDIT.md), `audit.html`, `mutants.json` ·",
            f"**{counts['caught']} of {planted} planted bugs caught**, {counts['does not apply']} cells do not apply,",
            f"{report['alarms']} false alarms in {report['sound_checks']} checks of the library as it is.",
        ),
    ]


def _load(report: dict[str, Any]) -> list[str]:
    lines = [
        "## A million releases",
        "",
        *_said(
            "`python -m benchmarks.ledger --json tests/reliability/load.json` · same machine, under other work ·",
            "σ = 1, q = 512/50,000, δ = 1e-5",
        ),
        "| ledger | bytes at the end | at its longest | read, s | RDP, s | PLD, s |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["ledgers"]:
        name = "one by one, with evidence" if row["block"] == 1 else f"blocks of {row['block']}"
        account = row["accounting"]
        times = " | ".join(f"{account[a]['first_seconds']:.2g}" for a in ("rdp", "pld"))
        lines.append(
            f"| {name} | {row['bytes']:,} | {row['largest_bytes']:,} | {account['read_seconds']:.2g} | {times} |"
        )
    charge = report["one_charge_on_this_disk"]
    return [
        *lines,
        "",
        *_said(
            "First calls, nothing cached but what the row above left. PRV finds no bound at this length and says so; it",
            f"returns the RDP bound. One charge took {charge['median_ms']:.2g} ms on the disk of the checkout (median of",
            f"1,000; worst {charge['worst_ms']:.3g} ms)..",
        ),
    ]


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(build(), encoding="utf-8")
    sys.exit(0)
