"""One's own data: a table, a folder of images, or arrays, read and encoded by what was declared of them.

    >>> source = source_for("patients.csv", columns=read_schema(path).columns, target="ill")
    >>> examples = source.read("patients.csv", classes=("no", "yes"))
    >>> examples.inputs, examples.targets

Nothing is read off the rows but their own encoding: what it depends on is declared, or is a name of a column or the shape of
an array, which no row changes. One kind of source per file; columns.py says what becomes of a cell, schema.py reads and drafts
the YAML file that declares a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dpivon.errors import bad
from dpivon.sources.arrays import Arrays, example_shape
from dpivon.sources.base import Examples, Source, files_of, kind_of
from dpivon.sources.columns import Column, Numeric, Strict
from dpivon.sources.images import Images
from dpivon.sources.schema import Schema, read_schema
from dpivon.sources.table import Table, check_column, column_names

AnySource = Table | Images | Arrays
__all__ = ["AnySource", "Examples", "Schema", "Source", "files_of", "kind_of", "read_schema", "source_for"]


def source_for(
    where: str,
    *,
    columns: Mapping[str, Column] | None = None,
    target: str | None = None,
    ignore: Sequence[str] = (),
    value_bounds: Numeric | None = None,
    delimiter: str = ",",
    image_size: int = 32,
    channels: Literal[1, 3] = 3,
) -> AnySource:
    """How to read and encode the data at ``where``.

    Args:
        where: a folder of images, a .csv or .parquet table, an .npz, or ``x.npy,y.npy``.
        columns: of a table: what is declared of each column.
        target: of a table: the column to predict.
        ignore: columns of a table that are not used.
        value_bounds: the range of an array's values, or of all columns that are not declared.
        delimiter: of a CSV file.
        image_size: images are resized to this side.
        channels: 1 for grey images, 3 for RGB.
    """
    kind, declared = kind_of(where), dict(columns or {})
    if kind == "image":
        _refuse("images", columns=declared, value_bounds=value_bounds, target=target)
        return Images(size=image_size, channels=channels)
    if kind == "array":
        _refuse("arrays", columns=declared, target=target, ignore=ignore)
        if value_bounds is None:
            problem = "the range of the values is private unless you state it, and nothing is read off the data"
            raise bad("bounds", None, problem, "State it, such as --bounds 0:255")
        return Arrays(sizes=example_shape(where), bounds=value_bounds)
    names = column_names(Path(where), delimiter)
    if target is None:
        raise bad("target", None, "is needed", f"Name the column to predict, one of {', '.join(names)}")
    check_column("target", target, names)
    used = _columns(names, declared, target, ignore, value_bounds)
    return Table(columns=used, target=target, delimiter=delimiter)


class Declaration(Strict):
    """What the owner of the data declares of it, by the names that ``dpivon train`` and studies share."""

    columns: dict[str, Column] = Field(default_factory=dict)
    target: str | None = None
    ignore: tuple[str, ...] = ()
    value_bounds: Numeric | None = None
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    image_size: Annotated[int, Field(ge=4, le=1024)] = 32
    channels: Literal[1, 3] = 3
    source: str = ""

    def reader(self, where: str) -> AnySource:
        """How to read the data at ``where``."""
        declared = {name: getattr(self, name) for name in Declaration.model_fields if name != "source"}
        return source_for(where, **declared)


def _refuse(kind: str, **given: object) -> None:
    for name, value in given.items():
        if value:
            raise bad(name, value, f"has no meaning for {kind}", "Leave it out")


def _columns(
    names: list[str], declared: dict[str, Column], target: str, ignore: Sequence[str], others_in: Numeric | None
) -> dict[str, Column]:
    """The declared columns in their order; then, if a range was stated for all others, those in the header's."""
    for name in [*declared, *ignore]:
        check_column("columns", name, names)
    columns = {name: column for name, column in declared.items() if name not in (target, *ignore)}
    others = [name for name in names if name not in (target, *columns, *ignore)]
    if others and others_in is None:
        raise bad(
            "columns",
            ", ".join(others),
            "neither range nor categories are declared, and nothing is read off the data",
            f"State --bounds {others[0]}:LOW:HIGH or --categories {others[0]}:A,B, use --schema, or --ignore {others[0]}",
        )
    if others_in is not None:
        columns |= dict.fromkeys(others, others_in)
    if not columns:
        raise bad("columns", "none", "there is nothing to learn from", "Declare at least one column besides the target")
    return columns
