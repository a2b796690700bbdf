"""The HTML file: sections put into one page that makes no network request, and in which no text can become markup.

Templates escape every value. Charts' data is JSON whose ``<`` is written as an escape, so that no class name can end its
script element. The page's policy allows its own two scripts and its style by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from dpivon._version import __version__
from dpivon.report.chart import Chart

GENERATOR = "dpivon report"
_HERE = Path(__file__).parent
# Control characters, halves of surrogate pairs, and the characters that turn text around.
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Section:
    """A part of the page: its template and what that reads; or the sentence that says why it is not there."""

    id: str
    title: str
    template: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    charts: tuple[Chart, ...] = ()
    left_out: str = ""
    folded: bool = False  # until the reader opens it


@dataclass(frozen=True)
class Content:
    """All that a page says of a folder of some ``kind``.

    At its top: ``unit`` is the first line, ``about`` says what and whose it is, ``warnings`` and ``findings`` are what a
    reader must know, and ``facts`` a few numbers.
    """

    kind: str
    title: str
    intro: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    confusion: tuple[tuple[str, ...], list[list[int]]] | None = (
        None  # classes and counts, as a figure besides the charts
    )

    unit: str = ""
    about: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()
    findings: Sequence[str] = ()

    @property
    def charts(self) -> list[Chart]:
        return [chart for section in self.sections for chart in section.charts]


def versions(facts: Mapping[str, str], again: str) -> Section:
    """Versions and hardware of what is reported, and the command that makes the report."""
    values = {"facts": {k: v for k, v in facts.items() if v}, "again": again, "version": __version__}
    return Section("versions", "Versions and hardware", "versions.html", values)


def page(content: Content, command: str) -> str:
    """The whole file."""
    style, script = _asset("report.css"), _asset("charts.js") + _asset("page.js")
    environment = _environment()
    shown = []
    for section in content.sections:
        charts, body = {chart.id: chart for chart in section.charts}, ""
        if not section.left_out:
            body = environment.get_template(section.template).render(section.values, charts=charts)
        own = {"id": section.id, "title": section.title, "left_out": section.left_out, "folded": section.folded}
        shown.append({**own, "body": Markup(body)})
    data = {chart.id: chart.data() for chart in content.charts}
    return environment.get_template("page.html").render(
        content=content,
        sections=shown,
        command=command,
        generator=GENERATOR,
        policy=Markup(_policy(style, script)),
        style=Markup(style),
        script=Markup(script),
        data=Markup(embedded(data)),
    )


def embedded(value: Any) -> str:
    """JSON for a script element: no character of it can begin a tag, an entity or a comment."""
    text = json.dumps(clean(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def clean(value: Any) -> Any:
    """Texts without characters that cannot be shown, or that would change how others are."""
    if isinstance(value, str):
        return value if isinstance(value, Markup) else _UNSHOWN.sub("\ufffd", value)
    if isinstance(value, dict):
        return {key: clean(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return value


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = _code
    environment.filters["digits"] = lambda value, n=4: f"{value:.{n}g}"
    environment.filters["fixed"] = lambda value, n=3: f"{value:.{n}f}"
    return environment


def _code(text: str) -> Markup:
    """Escaped, with what stands between backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(clean(text)))))


def _asset(name: str) -> str:
    return (_HERE / "assets" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    def sha(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    return (
        f"default-src 'none'; script-src {sha(script)}; style-src {sha(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
