"""Tables: CSV by the standard library, Parquet by pyarrow."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpivon.errors import bad, need
from dpivon.sources.base import Examples, Source, rows
from dpivon.sources.columns import Categorical, Column, is_missing, label, number


class Table(Source):
    """Columns by their declared ranges and categories, side by side in the declared order."""

    kind: Literal["table"] = "table"
    columns: dict[str, Column]
    target: str
    id: str | None = None
    delimiter: str = ","

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(column.width for column in self.columns.values()),)

    def told(self) -> str:
        return f"a row of {len(self.columns)} columns"

    def read(self, where: str, classes: tuple[str, ...] | None) -> Examples:
        wanted = [*self.columns, *([self.target] if classes is not None else [])]
        if self.id is not None:
            wanted.append(self.id)
        cells = read_columns(Path(where), wanted, self.delimiter)
        encoded = np.concatenate([column.encode(cells[name]) for name, column in self.columns.items()], axis=1)
        ids = None if self.id is None else [label(cell) if cell is not None else "" for cell in cells[self.id]]
        return rows(where, encoded, cells.get(self.target), classes, ids)

    def public(self) -> str:
        columns = "; ".join(f"{name}: {column.told()}" for name, column in self.columns.items())
        return f"The names of the columns and what they may hold: {columns}."

    def not_chosen(self) -> list[str]:
        other = "No list of the values that occur: an undeclared category goes to one slot for all others."
        return [*super().not_chosen(), other]

    def oddities(self, where: str) -> list[str]:
        cells = read_columns(Path(where), list(self.columns), self.delimiter)
        lines = []
        for name, column in self.columns.items():
            missing = sum(is_missing(cell) for cell in cells[name])
            if isinstance(column, Categorical):
                odd = sum(column.slot(cell) == len(column.categories) for cell in cells[name])
                words = f"{odd} other than its categories"
            else:
                values = [number(cell) for cell in cells[name]]
                unread = sum(math.isnan(value) for value in values) - missing
                clamped = sum(value < column.min or value > column.max for value in values)
                words = f"{clamped} clamped, {unread} that are no numbers"
            lines.append(f"{name}: {words}, {missing} missing, of {len(cells[name])}")
        return lines


def column_names(path: Path, delimiter: str = ",") -> list[str]:
    """The header. Adding or removing a row does not change it, so it is public."""
    if path.suffix.lower() == ".parquet":
        names = _parquet(path, lambda file: file.schema_arrow.names)
    else:
        names = next(_csv_rows(path, delimiter), [])
    names = [str(name).strip() for name in names]
    if not any(names):
        raise bad("data", str(path), "has no header", "Put the names of the columns in its first line")
    if len(set(names)) < len(names) or "" in names:
        twice = next(name for name in names if names.count(name) > 1 or not name)
        raise bad("data", str(path), f"has a column name {twice!r} twice or empty", "Give every column its own name")
    return names


def check_column(argument: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise bad(argument, name, "is not a column of the table", f"Name one of {', '.join(names)}")


def read_columns(path: Path, wanted: list[str], delimiter: str = ",") -> dict[str, list[Any]]:
    """The cells of some columns, as texts or as Parquet has them."""
    names = column_names(path, delimiter)
    for name in wanted:
        if name not in names:
            problem = f"has no column {name!r}, but {', '.join(map(repr, names))}"
            raise bad("data", str(path), problem, "Correct the name in the schema, or the file")
    if path.suffix.lower() == ".parquet":
        table = _parquet(path, lambda file: file.read(columns=wanted))
        return {name: table.column(name).to_pylist() for name in wanted}
    where = [names.index(name) for name in wanted]
    out: list[list[str]] = [[] for _ in wanted]
    lines = _csv_rows(path, delimiter)
    next(lines)
    for i, row in enumerate(lines, start=1):
        if not row:
            continue
        if len(row) != len(names):
            problem = f"row {i} has {len(row)} cells and the header {len(names)}"
            raise bad("data", str(path), problem, "Repair the row, quote a text with commas, or give --delimiter")
        for cells, at in zip(out, where, strict=True):
            cells.append(row[at])
    return dict(zip(wanted, out, strict=True))


def _csv_rows(path: Path, delimiter: str) -> Any:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            yield from csv.reader(file, delimiter=delimiter, strict=True)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise bad("data", str(path), f"cannot be read as CSV ({error})", "Save it as CSV in UTF-8") from None


def _parquet(path: Path, take: Callable[[Any], Any]) -> Any:
    parquet = need("pyarrow.parquet", "parquet")
    try:
        return take(parquet.ParquetFile(str(path)))
    except (OSError, ValueError, KeyError) as error:  # pyarrow's errors are among them
        raise bad("data", str(path), f"cannot be read as Parquet ({error})", "Write the file again") from None
