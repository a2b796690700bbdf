"""Where the numbers come from: configuration, ledger, versions, and the command that makes the report again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from dpivon._version import __version__
from dpivon.report.page import Section
from dpivon.report.privacy import Checked
from dpivon.report.run_folder import RunFolder


def command(folder: Path, out: Path, figures: Path | None) -> str:
    """What to type to get the same page."""
    words = ["dpivon", "report", str(folder)]
    words += ["--out", str(out)] if out != folder / "report.html" else []
    words += ["--figures", str(figures)] if figures is not None else []
    return shlex.join(words)


def configuration(run: RunFolder) -> Section:
    title = "Configuration"
    if run.config is None:
        return Section("configuration", title, left_out="The folder holds no config.yaml.")
    return Section("configuration", title, "configuration.html", {"config": run.config})


def choices(run: RunFolder) -> Section:
    title = "Choices that were not made from the data"
    found = run.summary.choices_not_made
    if not found:
        return Section("choices", title, left_out="The summary names none.")
    return Section("choices", title, "choices.html", {"choices": found})


def ledger(run: RunFolder, checked: Checked) -> Section:
    title = "The ledger, and how to check it"
    if run.ledger is None:
        return Section("ledger", title, left_out="The folder holds no ledger, so nobody can check what was released.")
    values = {
        "digest": run.ledger.digest,
        "same": run.ledger.digest == run.summary.ledger_digest,
        "stated": run.summary.ledger_digest,
        "releases": run.ledger.record.releases,
        "torn": run.ledger.record.torn,
        "problems": checked.problems,
        "show": shlex.join(["dpivon", "ledger", "show", str(run.folder), "--delta", f"{run.summary.delta:g}"]),
        "sum": shlex.join(["sha256sum", str(run.folder / "ledger.jsonl")]),
    }
    return Section("ledger", title, "ledger.html", values)


def machine(facts: Mapping[str, str], again: str) -> Section:
    values = {"facts": {k: v for k, v in facts.items() if v}, "again": again, "version": __version__}
    return Section("versions", "Versions and hardware", "versions.html", values)


def run_facts(run: RunFolder) -> dict[str, str]:
    summary = run.summary
    seconds = "" if summary.seconds is None else f"{summary.seconds:.1f} s"
    return {"hardware": summary.hardware, "training took": seconds, **summary.versions}
