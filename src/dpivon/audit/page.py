"""The one-page report: verdict, figure of audited against claimed ε, table of checks, and what each could have seen."""

from __future__ import annotations

import base64
import json
import math
import platform
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

from dpivon._version import __version__
from dpivon.audit.run import CHECKS, Audit
from dpivon.audit.tier_c import Audited
from dpivon.errors import bad

# Okabe and Ito's palette, which colour-blind readers can distinguish.
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#000000", "#F0E442", "#D55E00"]
MARKS = ["o", "s", "^", "D", "v", "P", "X", "*"]
RED = "#D55E00"
_STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;width:100%;font-size:13px}td,th{padding:.3em .6em;border-bottom:1px solid #ddd;text-align:left;
vertical-align:top}.ok{color:#00724f}.bad{color:#b33c00;font-weight:bold}.na{color:#888}img{max-width:100%}
.small{font-size:12px;color:#555}"""
_MARK = {True: ("ok", "✓"), False: ("bad", "✗"), None: ("na", "–")}


def write(audits: Sequence[Audit], out: Path | str, broken: Sequence[tuple[str, Audited]] = ()) -> None:
    """``audit.json``, ``audit.png`` and ``audit.html`` in the folder ``out``, which is made if need be."""
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise bad("out", str(folder), "is a file", "Name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"dpivon": __version__, "torch": torch.__version__, "python": platform.python_version()}
    content = {
        "made_with": facts,
        "holds": all(a.holds for a in audits),
        "audits": [_plain(a.as_dict()) for a in audits],
        "with_a_bug": [{"bug": name} | _plain(vars(a)) for name, a in broken],
    }
    (folder / "audit.json").write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    plot(audits, folder / "audit.png", broken)
    (folder / "audit.html").write_text(_html(audits, (folder / "audit.png").read_bytes(), facts))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return finite(value) if isinstance(value, float) else value


def _html(audits: Sequence[Audit], figure: bytes, facts: dict[str, str]) -> str:
    failures = [f"{a.path}: {text}" for a in audits for text in a.failures]
    verdict = (
        f"<p class=bad>{len(failures)} findings against the guarantee:</p><ul>"
        + "".join(f"<li>{escape(text)}</li>" for text in failures)
        + "</ul>"
        if failures
        else "<p class=ok><b>Nothing was found against the guarantee.</b> An audit can refute a claim; it cannot prove one.</p>"
    )
    first = audits[0]
    data = base64.b64encode(figure).decode()
    return f"""<!doctype html><html lang=en><meta charset=utf-8><title>dpivon audit</title><style>{_STYLE}</style>
<h1>Privacy audit</h1><p>{escape(first.model)} ({first.parameters} parameters), trained by {escape(first.method)}, on
{len(audits)} path{"s" if len(audits) > 1 else ""};
dpivon {facts["dpivon"]}, torch {facts["torch"]}, Python {facts["python"]}.</p>
{verdict}<img alt="audited against claimed epsilon" src="data:image/png;base64,{data}">
<h2>Checks</h2><table><tr><th>tier<th>question{"".join(f"<th>{a.path}" for a in audits)}<th>what it can see</tr>
{"".join(_row(i, audits) for i in range(len(CHECKS)))}</table>
<h2>Lower bounds on ε</h2><table><tr><th>path<th>attack<th>σ<th>guesses<th>audited<th>claimed<th>correct engine<th>notices noise
too small by</tr>{"".join(_bound(a.path, b) for a in audits for b in a.audited)}</table>
<p class=small>Tier A is exact on the data it saw and says nothing of others. Tier B fails by chance about once in a million
tests. Tier C: bounds of single releases hold with confidence 1 − 1e-6, those of one training run with 0.99; they are lower
bounds, so one far below the claim is a weak attack or a safe mechanism, and cannot tell which.</p></html>
"""


def _row(i: int, audits: Sequence[Audit]) -> str:
    check = CHECKS[i]
    found = [next((f for f in a.findings if f.check == check.name), None) for a in audits]
    if all(f is None for f in found):
        return ""
    cells = ""
    for f in found:
        kind, mark = _MARK[f.holds if f is not None else None]
        cells += f'<td class={kind} title="{escape(f.detail if f is not None else "not run")}">{mark}'
    detail = next((f.detail for f in found if f is not None and f.holds is not None), "")
    power = f"<br><span class=small>{escape(detail)}</span>"
    return f"<tr><td>{check.tier}<td>{escape(check.question)}{power}{cells}<td class=small>{escape(check.power)}</tr>"


def _bound(path: str, a: Audited) -> str:
    expected = "" if finite(a.expected) is None else f"{a.expected:.2f}"
    notices = f"{a.notices:.2f}×" if expected else "gross errors only"
    kind = "ok" if a.holds else "bad"
    return (
        f"<tr><td>{path}<td>{a.attack}<td>{a.sigma:g}<td>{a.guesses}<td class={kind}>{a.audited:.2f}<td>{a.claimed:.2f}"
        f"<td>{expected}<td>{notices}</tr>"
    )


def plot(audits: Sequence[Audit], path: Path, broken: Sequence[tuple[str, Audited]] = ()) -> None:
    """Draw lower bounds by path, without pyplot and so without global state.

    ``broken`` are bounds on engines with a planted bug, to show what a failure looks like.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    points = [a for audit in audits for a in audit.audited] + [a for _, a in broken]
    top = 1.6 * max([a.claimed for a in points] + [1.0])
    low = 0.6 * min([a.claimed for a in points if a.claimed > 0] + [1.0])
    axes.fill_between([low, top], [low, top], [3 * top, 3 * top], color=RED, alpha=0.08, lw=0)
    axes.plot([low, top], [low, top], color="#666666", lw=1.2)
    axes.text(low * 1.1, 2.2 * top, "above the line: the claim is refuted", color=RED, fontsize=9)
    if single := [a for audit in audits[:1] for a in audit.audited if a.attack == "single releases"]:
        line = sorted((a.claimed, a.expected) for a in single)
        axes.plot(*zip(*line, strict=True), color="#999999", ls="--", lw=1, label="expected of a correct engine")
    for i, audit in enumerate(audits):
        colour, mark = COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]
        # Paths agree so well that their marks would hide each other: set them a little apart.
        shift = 1.0 + 0.018 * (i - (len(audits) - 1) / 2)
        for attack, fill in (("single releases", colour), ("own model", "none"), ("one training run", "white")):
            found = [a for a in audit.audited if a.attack == attack]
            style = {"marker": mark, "ms": 8 if attack == "one training run" else 6, "mfc": fill, "mec": colour}
            label = audit.path if attack == "single releases" else None
            places = [a.claimed * shift for a in found], [max(a.audited, low * 0.6) for a in found]
            axes.plot(*places, ls="", label=label, **style)
    if any(a.attack == "one training run" for audit in audits for a in audit.audited):
        style = {"marker": "o", "ms": 8, "mfc": "white", "mec": "#666666"}
        axes.plot([], [], ls="", label="open: one training run, or own model", **style)
    for name, a in broken:
        at = (a.claimed, min(a.audited, 2.6 * top))
        axes.plot(*at, ls="", marker="x", ms=9, mew=2, color=RED)
        axes.annotate(name, at, xytext=(-9, -3), textcoords="offset points", ha="right", fontsize=8, color=RED)
    axes.set(xscale="log", yscale="log")
    for axis, most in ((axes.xaxis, top), (axes.yaxis, 3 * top)):
        ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low * 0.5 <= t <= most]
        axis.set_ticks(ticks, [f"{t:g}" for t in ticks])
        axis.set_ticks([], minor=True)
    axes.set(xlim=(low, top), ylim=(low * 0.5, 3 * top))
    axes.set(xlabel="claimed ε at δ = 1e-5", ylabel="audited: ε is at least this")
    axes.set_title("What attackers with canaries can prove, against what is claimed")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    figure.savefig(path, dpi=140)


def finite(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None
