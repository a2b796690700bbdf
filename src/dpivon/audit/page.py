"""The one-page report: verdict, plot, table of checks, and what each could have seen."""

from __future__ import annotations

import base64
import json
import platform
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

from dpivon._version import __version__
from dpivon.audit.plot import finite, plot
from dpivon.audit.run import Audit
from dpivon.audit.tier_c import Audited
from dpivon.audit.tiers import CHECKS
from dpivon.errors import bad

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


def _html(audits: Sequence[Audit], picture: bytes, facts: dict[str, str]) -> str:
    failures = [f"{a.path}: {text}" for a in audits for text in a.failures]
    verdict = (
        f"<p class=bad>{len(failures)} findings against the guarantee:</p><ul>"
        + "".join(f"<li>{escape(text)}</li>" for text in failures)
        + "</ul>"
        if failures
        else "<p class=ok><b>Nothing was found against the guarantee.</b> An audit can refute a claim; it cannot prove one.</p>"
    )
    first = audits[0]
    data = base64.b64encode(picture).decode()
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
