"""The schema file: what is publicly known of a table, in YAML, and how one is drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from dpivon.durable.files import check_parent, replace
from dpivon.errors import bad
from dpivon.sources.columns import (
    PLAIN,
    Column,
    CSVFormat,
    Labels,
    Numeric,
    Target,
    is_missing,
    label,
    names_of,
    numbers,
)
from dpivon.sources.owner import named_like_an_id
from dpivon.yaml_files import read_yaml, validated

_FIX = "Compare it with examples/patients.yaml, or draft one with `dpivon train DATA --write-schema schema.yaml`"
MOST_CATEGORIES = 20  # in a public sample; a column with more distinct texts is left to its owner


class Schema(CSVFormat):
    """``source`` says where ranges and categories come from; it is printed wherever they are."""

    columns: dict[str, Column] = Field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    target: Target | None = None
    id: str | None = None
    classes: Labels | None = None
    task: Literal["classification", "regression"] | None = None
    target_bounds: Numeric | None = None
    noise_std: float | str | None = None
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
    for name in schema.model_fields_set - {"columns", "ignore"}:
        if merged.get(name) is None:
            merged[name] = getattr(schema, name)
    return merged


def draft(names: list[str], target: str | tuple[str, ...] | None, form: CSVFormat = PLAIN) -> str:
    """A schema from the names of the columns alone: every number is left to somebody who knows it without the data."""
    head = [
        "# What is publicly known of each column. Nothing was read off the data: fill in every blank from what you know",
        "# without it (the range of the instrument, the limits of the form, a published reference), never from these rows.",
        "# A column of texts or codes gets  categories: [first, second]  instead of min and max; a column of dates gets",
        "# {min: 2015-01-01, max: 2025-12-31}, and format: '%d.%m.%Y' if it is not written like that.",
        "source: ''  # where the numbers come from; it is printed wherever they are used",
    ]
    return _written(head, target, [], dict.fromkeys(names, "{min: , max: }"), form)


def draft_from_sample(
    columns: dict[str, list[Any]], target: str | tuple[str, ...] | None, sample: Path, form: CSVFormat = PLAIN
) -> str:
    """A schema from a sample that is public: the range of numbers there, and the texts that occur there."""
    head = [
        f"# Drafted from {sample}, which was declared public. Widen the ranges: values outside are clamped.",
        f"source: {_quoted(f'the public sample {sample.name}')}",
    ]
    classes = sorted({label(cell) for name in names_of(target) for cell in columns[name] if not is_missing(cell)})
    return _written(head, target, classes, {name: _guess(cells, form) for name, cells in columns.items()}, form)


def _written(
    head: list[str], target: str | tuple[str, ...] | None, classes: list[str], columns: dict[str, str], form: CSVFormat
) -> str:
    named = f"[{', '.join(map(_quoted, classes))}]" if classes else ""
    targets = [_quoted(name) for name in names_of(target)]
    to_predict = (
        targets[0] if len(targets) == 1 else f"[{', '.join(targets)}]" if targets else " # the column to predict"
    )
    own = next((name for name in columns if name not in names_of(target) and named_like_an_id(name)), "")
    lines = [
        *head,
        f"target: {to_predict}",
        f"classes: {named}  # every value the target may have",
        f"id: {_quoted(own) if own else ''}  # the column that names a row or its person, if any: it is never learned from",
        "ignore: []  # columns that are not used",
        *(f"{name}: {_quoted(value)}" for name, value in form.model_dump(exclude_defaults=True).items()),
        "columns:",
        *(
            f"  {_quoted(name)}: {declared}"
            for name, declared in columns.items()
            if name not in (*names_of(target), own)
        ),
    ]
    return "\n".join(lines) + "\n"


def _guess(cells: list[Any], form: CSVFormat) -> str:
    there = [cell for cell in cells if not is_missing(cell)]
    values = numbers(form.points(there))
    if len(values) and np.isfinite(values).all() and values.min() < values.max():
        return f"{{min: {values.min():.6g}, max: {values.max():.6g}}}"
    texts = sorted({label(cell) for cell in there})
    if not texts or len(texts) > MOST_CATEGORIES:
        return f"{{min: , max: }}  # {len(texts)} different texts in the sample: fill in, or ignore the column"
    return f"{{categories: [{', '.join(map(_quoted, texts))}]}}"


def _quoted(text: str) -> str:
    return '"\\t"' if text == "\t" else "'" + text.replace("'", "''") + "'"


def write_draft(path: Path, text: str) -> None:
    if path.exists():
        raise bad("write-schema", str(path), "exists, and may hold your work", "Give another name")
    check_parent("write-schema", path)
    replace(path, text.encode())
