"""Tables: CSV by the standard library, Parquet by pyarrow; one file, or several with the same columns."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from dpivon.errors import bad, need
from dpivon.sources.base import Examples, Source, Targets, files_of, rows, target_values
from dpivon.sources.columns import PLAIN, Column, CSVFormat, Numeric, Target, label, names_of
from dpivon.sources.owner import Finding, look_at_column


class Table(CSVFormat, Source):
    """Columns by their declared ranges and categories, side by side in the declared order."""

    kind: Literal["table"] = "table"
    columns: dict[str, Column]
    target: Target
    id: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(column.width for column in self.columns.values()),)

    def describe(self) -> str:
        return f"a row of {len(self.columns)} columns"

    def read(self, where: str, targets: Targets | None) -> Examples:
        numeric = targets is not None and not isinstance(targets, tuple)
        several = not isinstance(self.target, str)
        others = dict.fromkeys(names_of(self.target) if targets is not None else (), numeric)
        cells = self._cells(where, others | ({self.id: False} if self.id is not None else {}))
        encoded = np.concatenate([column.encode(cells[name]) for name, column in self.columns.items()], axis=1)
        ids = None if self.id is None else [label(cell) if cell is not None else "" for cell in cells[self.id]]
        found = rows(where, encoded, None if several else cells.get(str(self.target)), targets, ids)
        if targets is None or not several:
            return found
        each = [target_values(f"{where}, column {name}", cells[name], targets) for name in self.target]
        return replace(found, targets=torch.from_numpy(np.stack(each, axis=1).astype(np.float32)))

    def _cells(self, where: str, others: dict[str, bool] | None = None) -> dict[str, list[Any]]:
        """The cells of the columns, and of ``others`` (name: whether they are numbers), with points for decimal commas."""
        numeric = {name: isinstance(column, Numeric) for name, column in self.columns.items()} | (others or {})
        parts = [read_columns(Path(path), list(numeric), self) for path in files_of(where)]
        cells = {name: [cell for part in parts for cell in part[name]] for name in numeric}
        return {name: self.points(column) if numeric[name] else column for name, column in cells.items()}

    def public(self) -> str:
        columns = "; ".join(f"{name}: {column.describe()}" for name, column in self.columns.items())
        return f"The names of the columns and what they may hold: {columns}."

    def not_chosen(self) -> list[str]:
        other = "No list of the values that occur: an undeclared category goes to one slot for all others."
        return [*super().not_chosen(), other]

    def look(self, where: str, *, learning: bool = True) -> list[Finding]:
        cells = self._cells(where)
        mark = {",": ".", ".": ","}[self.decimal]
        return [look_at_column(name, column, cells[name], mark, learning) for name, column in self.columns.items()]


def column_names(path: Path, form: CSVFormat = PLAIN) -> list[str]:
    """The header. Adding or removing a row does not change it, so it is public."""
    if path.suffix.lower() == ".parquet":
        names = _parquet(path, lambda file: file.schema_arrow.names)
    else:
        names = next(_csv_rows(path, form), [])
    names = [str(name).strip() for name in names]
    if not any(names):
        raise bad("data", str(path), "has no header", "Put the names of the columns in its first line")
    if len(set(names)) < len(names) or "" in names:
        twice = next(name for name in names if names.count(name) > 1 or not name)
        raise bad("data", str(path), f"has a column name {twice!r} twice or empty", "Give every column its own name")
    if len(names) == 1 and (other := [mark for mark in ";\t|," if mark in names[0]]):
        mark = "tab" if other[0] == "\t" else f"'{other[0]}'"
        problem = f"leaves the header of {path} in one piece, {names[0]!r}"
        raise bad("delimiter", form.delimiter, problem, f"State --delimiter {mark}")
    return names


def check_column(argument: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise bad(argument, name, "is not a column of the table", f"Name one of {', '.join(names)}")


def read_columns(path: Path, wanted: list[str], form: CSVFormat = PLAIN) -> dict[str, list[Any]]:
    """The cells of some columns, as texts or as Parquet has them."""
    names = column_names(path, form)
    for name in wanted:
        if name not in names:
            problem = f"has no column {name!r}, but {', '.join(map(repr, names))}"
            raise bad("data", str(path), problem, "Correct the name in the schema, or the file")
    if path.suffix.lower() == ".parquet":
        table = _parquet(path, lambda file: file.read(columns=wanted))
        return {name: table.column(name).to_pylist() for name in wanted}
    where = [names.index(name) for name in wanted]
    out: list[list[str]] = [[] for _ in wanted]
    lines = _csv_rows(path, form)
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


def _csv_rows(path: Path, form: CSVFormat) -> Any:
    try:
        with open(path, newline="", encoding=form.encoding) as file:
            yield from csv.reader(file, delimiter=form.delimiter, strict=True)
    except (UnicodeDecodeError, LookupError) as error:
        fix = "Save it as UTF-8, or state its encoding, such as --encoding cp1252"
        raise bad("encoding", form.encoding, f"is not that of {path} ({error})", fix) from None
    except (OSError, csv.Error) as error:
        raise bad("data", str(path), f"cannot be read as CSV ({error})", "Save it as CSV in UTF-8") from None


def _parquet(path: Path, take: Callable[[Any], Any]) -> Any:
    parquet = need("pyarrow.parquet", "parquet")
    try:
        return take(parquet.ParquetFile(str(path)))
    except (OSError, ValueError, KeyError) as error:  # pyarrow's errors are among them
        raise bad("data", str(path), f"cannot be read as Parquet ({error})", "Write the file again") from None
