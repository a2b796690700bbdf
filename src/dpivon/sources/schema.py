"""The schema file: what is publicly known of a table, in YAML, and how one is drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from dpivon.durable.files import check_parent, replace
from dpivon.errors import bad
from dpivon.sources.columns import Column, Labels, Strict, is_missing, label, number
from dpivon.yaml_files import read_yaml, validated

_FIX = "Compare it with examples/patients.yaml, or draft one with `dpivon train DATA --write-schema schema.yaml`"
MOST_CATEGORIES = 20  # in a public sample; a column with more distinct texts is left to its owner


class Schema(Strict):
    """``source`` says where ranges and categories come from; it is printed wherever they are."""

    columns: dict[str, Column] = Field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    target: str | None = None
    id: str | None = None
    classes: Labels | None = None
    source: str = ""


def read_schema(path: Path) -> Schema:
    """The declared columns of a table, from the YAML file at ``path``."""
    raw = read_yaml("schema", path, missing="Give the path of a schema file", fix=_FIX)
    return validated(Schema, {} if raw is None else raw, "schema", fix=_FIX, place=str(path))


def with_schema(given: dict[str, Any], base: Path | None = None) -> dict[str, Any]:
    """Declarations with those of the file at ``schema``, a path from ``base``, under them: what is given says more."""
    merged = dict(given)
    if (path := merged.pop("schema", None)) is None:
        return merged
    schema = read_schema((base or Path()) / str(path))
    columns = {name: column.model_dump() for name, column in schema.columns.items()}
    merged["columns"] = {**columns, **(given.get("columns") or {})}
    merged["ignore"] = [*schema.ignore, *(given.get("ignore") or [])]
    for name in ("target", "id", "classes", "source"):
        if merged.get(name) is None and getattr(schema, name):
            merged[name] = getattr(schema, name)
    return merged


def draft(names: list[str], target: str | None) -> str:
    """A schema from the names of the columns alone: every number is left to somebody who knows it without the data."""
    head = [
        "# What is publicly known of each column. Nothing was read off the data: fill in every blank from what you know",
        "# without it (the range of the instrument, the limits of the form, a published reference), never from these rows.",
        "# A column of texts or codes gets  categories: [first, second]  instead of min and max.",
        "source: ''  # where the numbers come from; it is printed wherever they are used",
    ]
    return _written(head, target, [], dict.fromkeys(names, "{min: , max: }"))


def draft_from_sample(columns: dict[str, list[Any]], target: str | None, sample: Path) -> str:
    """A schema from a sample that is public: the range of numbers there, and the texts that occur there."""
    head = [
        f"# Drafted from {sample}, which was declared public. Widen the ranges: values outside are clamped.",
        f"source: {_quoted(f'the public sample {sample.name}')}",
    ]
    classes = [] if target is None else sorted({label(cell) for cell in columns[target] if not is_missing(cell)})
    return _written(head, target, classes, {name: _guess(cells) for name, cells in columns.items()})


def _written(head: list[str], target: str | None, classes: list[str], columns: dict[str, str]) -> str:
    lines = [
        *head,
        f"target: {_quoted(target) if target is not None else ' # the column to predict'}",
        f"classes: [{', '.join(map(_quoted, classes))}]  # every value the target may have",
        "id:  # the column that names a row or its person, if there is one: it is never learned from",
        "ignore: []  # columns that are not used",
        "columns:",
        *(f"  {_quoted(name)}: {declared}" for name, declared in columns.items() if name != target),
    ]
    return "\n".join(lines) + "\n"


def _guess(cells: list[Any]) -> str:
    there = [cell for cell in cells if not is_missing(cell)]
    values = np.array([number(cell) for cell in there])
    if len(values) and np.isfinite(values).all() and values.min() < values.max():
        return f"{{min: {values.min():.6g}, max: {values.max():.6g}}}"
    texts = sorted({label(cell) for cell in there})
    if not texts or len(texts) > MOST_CATEGORIES:
        return f"{{min: , max: }}  # {len(texts)} different texts in the sample: fill in, or ignore the column"
    return f"{{categories: [{', '.join(map(_quoted, texts))}]}}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def write_draft(path: Path, text: str) -> None:
    if path.exists():
        raise bad("write-schema", str(path), "exists, and may hold your work", "Give another name")
    check_parent("write-schema", path)
    replace(path, text.encode())
