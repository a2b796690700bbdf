"""The one-page report: verdict, figure of audited against claimed ε, table of checks, and what each could have seen."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dpivon._version import __version__
from dpivon.audit.run import CHECKS, Audit
from dpivon.audit.session import Check
from dpivon.audit.tier_c import Audited
from dpivon.errors import bad
from dpivon.report.chart import GREY, ORANGE, Axis, Chart, Panel, Point, Series, View, finite
from dpivon.report.figures import draw
from dpivon.report.page import Content, Section, page

# Of Okabe and Ito's palette, which colour-blind readers can distinguish.
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442"]
MARKS = ["o", "s", "^", "D"]
_MARK = {True: ("good", "✓"), False: ("wrong", "✗"), None: ("small", "–")}


def write(audits: Sequence[Audit], out: Path | str, broken: Sequence[tuple[str, Audited]] = ()) -> None:
    """``audit.json`` and ``audit.html`` in the folder ``out``, made if need be; ``audit.png`` if there are bounds to draw.

    ``broken`` are bounds on engines with a planted bug, to show what a failure looks like.
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise bad("out", str(folder), "is a file", "Name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"dpivon": __version__, "torch": torch.__version__, "python": platform.python_version()}
    values = {
        "made_with": facts,
        "holds": all(a.holds for a in audits),
        "audits": [_plain(a.as_dict()) for a in audits],
        "with_a_bug": [{"bug": name} | _plain(vars(a)) for name, a in broken],
    }
    (folder / "audit.json").write_text(json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    shown = content(audits, facts, broken)
    (folder / "audit.png").unlink(missing_ok=True)  # of an earlier audit
    draw(shown.charts, None, folder, ("png",))
    (folder / "audit.html").write_text(page(shown, "dpivon audit"), encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return finite(value) if isinstance(value, float) else value


def content(audits: Sequence[Audit], facts: dict[str, str], broken: Sequence[tuple[str, Audited]] = ()) -> Content:
    """What the page says."""
    first, bounds = audits[0], [(a.path, b) for a in audits for b in a.audited]
    failures = [f"{a.path}: {text}" for a in audits for text in a.failures]
    found = "Nothing was found against the guarantee. An audit can refute a claim; it cannot prove one."
    intro = f"{first.model} ({first.parameters} parameters), trained by {first.method}, on {len(audits)} path"
    rows = [row for check in CHECKS if (row := _row(check, audits)) is not None]
    bounded = bool(bounds or broken)
    quick = "The quick audit makes one bound, which is among the checks: leave out `--quick` for the curve."
    sections = [
        Section(
            "bounds",
            "Lower bounds on ε",
            "audit-bounds.html",
            {"bounds": [_bound(*b) for b in bounds]},
            (chart(audits, broken),) if bounded else (),
            left_out="" if bounded else quick,
        ),
        Section("checks", "Checks", "audit-checks.html", {"paths": [a.path for a in audits], "rows": rows}),
    ]
    checked = sum(f.holds is not None for a in audits for f in a.findings)
    return Content(
        "audit",
        "Privacy audit",
        f"{intro}{'s' if len(audits) > 1 else ''}.",
        [("checks made", str(checked)), ("against the guarantee", str(len(failures))), *facts.items()],
        sections,
        warnings=failures,
        findings=[] if failures else [found],
    )


def _row(check: Check, audits: Sequence[Audit]) -> dict[str, Any] | None:
    found = [next((f for f in a.findings if f.check == check.name), None) for a in audits]
    if all(f is None for f in found):
        return None
    cells = [(*_MARK[None if f is None else f.holds], "not run" if f is None else f.detail) for f in found]
    detail = next((f.detail for f in found if f is not None and f.holds is not None), "")
    return {"tier": check.tier, "question": check.question, "detail": detail, "cells": cells, "power": check.power}


def _bound(path: str, a: Audited) -> list[str]:
    expected = "" if finite(a.expected) is None else f"{a.expected:.2f}"
    notices = f"{a.notices:.2f}×" if expected else "gross errors only"
    audited = f"{a.audited:.2f}" if a.holds else f"✗ {a.audited:.2f}"
    return [path, a.attack, f"{a.sigma:g}", str(a.guesses), audited, f"{a.claimed:.2f}", expected, notices]


def chart(audits: Sequence[Audit], broken: Sequence[tuple[str, Audited]] = ()) -> Chart:
    """Lower bounds against claims, one line per path and attack."""
    points = [a for audit in audits for a in audit.audited] + [a for _, a in broken]
    top = 1.6 * max([a.claimed for a in points] + [1.0])
    low = 0.6 * min([a.claimed for a in points if a.claimed > 0] + [1.0])
    series = [Series("above it a claim is refuted", (Point(low, low), Point(top, top)), GREY, "reference")]
    if single := [a for audit in audits[:1] for a in audit.audited if a.attack == "single releases"]:
        line = sorted((a.claimed, a.expected) for a in single)
        series.append(Series("expected of a correct engine", tuple(Point(*p) for p in line), GREY, dash="--"))
    for i, audit in enumerate(audits):
        for j, attack in enumerate(("single releases", "own model", "one training run")):
            if found := sorted((a.claimed, max(a.audited, low * 0.6)) for a in audit.audited if a.attack == attack):
                points_of = tuple(Point(*p) for p in found)
                colour, dash = COLOURS[i % len(COLOURS)], ("-", ":", "--")[j]
                series.append(Series(f"{audit.path}: {attack}", points_of, colour, dash=dash, marker=MARKS[j]))
    for name, a in broken:
        series.append(
            Series(f"planted bug: {name}", (Point(a.claimed, min(a.audited, 2.6 * top)),), ORANGE, marker="D")
        )
    return Chart(
        "audit",
        "What attackers with canaries can prove, against what is claimed",
        "Each point is a lower bound on ε that holds with high confidence. A point above the line refutes the claim.",
        Axis("claimed ε at δ = 1e-5", log=True, low=low, high=top),
        (
            View(
                "ε",
                Axis("audited: ε is at least this", log=True, low=low * 0.5, high=3 * top),
                (Panel("", tuple(series)),),
            ),
        ),
    )
