"""One's own data: a table, a folder of images, or arrays, read and encoded by what was declared of them.

    >>> source = source_for("patients.csv", columns=read_schema(path).columns, target="ill")
    >>> examples = source.read("patients.csv", ("no", "yes"))
    >>> examples.inputs, examples.targets

Nothing is read off the rows but their own encoding: what it depends on is declared, or is a name of a column or the shape of
an array, which no row changes. One kind of source per file; columns.py says what becomes of a cell, schema.py reads and drafts
the YAML file that declares a table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dpivon.errors import bad
from dpivon.sources.arrays import Arrays, example_shape
from dpivon.sources.base import Examples, Source, files_of, kind_of
from dpivon.sources.columns import Column, CSVFormat, Numeric, Target, names_of
from dpivon.sources.images import Images
from dpivon.sources.schema import Schema, read_schema
from dpivon.sources.table import Table, check_column, column_names
from dpivon.yaml_files import validated

AnySource = Table | Images | Arrays
__all__ = [
    "Declaration",
    "Examples",
    "Schema",
    "Source",
    "files_of",
    "kind_of",
    "read_schema",
    "source_for",
]


def source_for(where: str, **declared: Any) -> AnySource:
    """How to read and encode the data at ``where``, by ``declared``, the fields of a :class:`Declaration`.

    ``where`` is a folder of images, a .csv or .parquet table, an .npz, or ``x.npy,y.npy``.
    """
    fix = "Give fields of dpivon.sources.Declaration"
    return validated(Declaration, declared, "declared", fix=fix).reader(where)


class Declaration(CSVFormat):
    """What the owner of the data declares of it, by the names that ``dpivon train`` and studies share.

    Attributes:
        columns: of a table: what is declared of each column.
        target: of a table: the column to predict, or several of yes and no.
        id: of a table: the column that names a row or its person. Never learned from; predictions carry it.
        ignore: columns of a table that are not used.
        value_bounds: the range of an array's values, or of all columns that are not declared.
        delimiter: of a CSV file, as are the next two.
        decimal: its decimal mark, "." or ",".
        encoding: such as utf-8 or cp1252.
        image_size: images are resized to this side.
        channels: 1 for grey images, 3 for RGB.
        source: where ranges and categories come from, in words.
    """

    columns: dict[str, Column] = Field(default_factory=dict)
    target: Target | None = None
    id: str | None = None
    ignore: tuple[str, ...] = ()
    value_bounds: Numeric | None = None
    image_size: Annotated[int, Field(ge=4, le=1024)] = 32
    channels: Literal[1, 3] = 3
    source: str = ""

    def reader(self, where: str) -> AnySource:
        """How to read and encode the data at ``where``."""
        kind = kind_of(where)
        if kind == "image":
            self._refuse("images", "columns", "value_bounds", "target", "id")
            return Images(size=self.image_size, channels=self.channels)
        if kind == "array":
            self._refuse("arrays", "columns", "target", "ignore", "id")
            if self.value_bounds is None:
                problem = "the range of the values is private unless you state it, and nothing is read off the data"
                raise bad("bounds", None, problem, "State it, such as --bounds 0:255")
            return Arrays(sizes=example_shape(where), bounds=self.value_bounds)
        names = self._names(where)
        if self.target is None:
            raise bad("target", None, "is needed", f"Name the column to predict, one of {', '.join(names)}")
        if len(set(names_of(self.target))) < len(names_of(self.target)):
            raise bad("target", self.target, "names a column twice", "Name every column once")
        for name in names_of(self.target):
            check_column("target", name, names)
        return Table(columns=self._used(names), target=self.target, id=self.id, **self._format())

    def _names(self, where: str) -> list[str]:
        """The header, which must be the same set of names in every file."""
        first, *others = files_of(where)
        names = column_names(Path(first), self)
        for path in others:
            if differ := set(names) ^ set(column_names(Path(path), self)):
                problem = f"has other columns than {first}: {', '.join(sorted(differ))} is in one of them only"
                raise bad("data", path, problem, "Give files with the same columns")
        return names

    def _format(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in CSVFormat.model_fields}

    def _refuse(self, kind: str, *fields: str) -> None:
        for name in fields:
            if value := getattr(self, name):
                raise bad(name, value, f"has no meaning for {kind}", "Leave it out")

    def _used(self, names: list[str]) -> dict[str, Column]:
        """The declared columns in their order; then, if a range was stated for all others, those in the header's."""
        for name in [*self.columns, *self.ignore]:
            check_column("columns", name, names)
        if self.id is not None:
            check_column("id", self.id, names)
            if self.id in names_of(self.target) or self.id in self.columns:
                problem = "is the target or a declared column, and an identifier is neither predicted nor learned from"
                raise bad("id", self.id, problem, "Name another column, or take it out of the declared ones")
        unused = (*names_of(self.target), self.id, *self.ignore)
        columns = {name: column for name, column in self.columns.items() if name not in unused}
        others = [name for name in names if name not in (*unused, *columns)]
        if others and self.value_bounds is None:
            one = others[0]
            fix = f"State --bounds {one}:LOW:HIGH or --categories {one}:A,B, use --schema, --ignore {one} or --id {one}"
            problem = "neither range nor categories are declared, and nothing is read off the data"
            raise bad("columns", ", ".join(others), problem, fix)
        if self.value_bounds is not None:
            columns |= dict.fromkeys(others, self.value_bounds)
        if not columns:
            fix = "Declare at least one column besides the target"
            raise bad("columns", "none", "there is nothing to learn from", fix)
        return columns
