"""Docstrings as they are written here, for mkdocstrings: roles become links, `>>>` lines an example, `#:` lines count.

The sources are read in editors far more often than on the site, so they keep Python's own way of writing.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(class|func|meth|mod|data|attr):`(~?)([\w.]+)`")
#: Functions that are named after their module.
SAME_NAME = ("dpivon.audit", "dpivon.fit", "dpivon.predict", "dpivon.privacy.accounting.budget")
EXAMPLE = re.compile(r"^( *)>>> ")


def linked(text: str, scope: Any) -> str:
    """:class:`~a.b.C` as a link to C; a name that is none of ours, or that is not on the site, stays code."""

    def one(match: re.Match[str]) -> str:
        role, short, name = match.groups()
        try:
            path = name if name.startswith("dpivon.") else scope.resolve(name)
        except griffe.NameResolutionError:
            path = ""
        shown = name.rsplit(".", 1)[-1] if short else name
        if not path.startswith("dpivon") or role in ("mod", "data"):
            return f"`{shown}`"
        if role == "func" and path in SAME_NAME:
            path += f".{shown.rsplit('.', 1)[-1]}"
        return f"[`{shown}`][{path}]"

    return ROLE.sub(one, text)


def fenced(text: str) -> str:
    """Runs of lines that begin with >>> or ... as blocks of code."""
    out: list[str] = []
    inside: str | None = None
    for line in text.splitlines():
        begins = EXAMPLE.match(line)
        goes_on = inside is not None and (line.strip() and line.startswith(inside))
        if inside is None and begins:
            inside = begins[1]
            out += [f"{inside}```pycon"]
        elif inside is not None and not goes_on:
            out += [f"{inside}```"]
            inside = None
        out.append(line)
    return "\n".join([*out, f"{inside}```"] if inside is not None else out)


def comment_above(attribute: Any) -> str:
    """What `#:` lines above an assignment say of it."""
    lines = attribute.filepath.read_text().splitlines()[: attribute.lineno - 1]
    said: list[str] = []
    while lines and lines[-1].strip().startswith("#:"):
        said.insert(0, lines.pop().strip().removeprefix("#:").strip())
    return "\n".join(said)


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.is_attribute and obj.docstring is None and (said := comment_above(obj)):
            obj.docstring = griffe.Docstring(said, parent=obj)
        if obj.docstring is not None:
            obj.docstring.value = fenced(linked(obj.docstring.value, obj))
