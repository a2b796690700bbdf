"""A column of a table as its owner declares it, and what becomes of a cell.

The encoding of a row is a function of that row and of declared, public numbers. No other row has any influence on it: there
is no mean, no deviation, no quantile and no list of values that occur.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from datetime import date, datetime
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from dpivon.bounds import Bounds

Array = np.ndarray[Any, Any]
_SWAPPED = str.maketrans(".,", ",.")

#: Texts that stand for a missing value, unless a column declares one of them as a category. A public list.
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _declared_label(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        raise ValueError("is a truth value or nothing in YAML; put it in quotes")
    return label(value) if isinstance(value, str | int | float) else value


def label(value: Any) -> str:
    """A cell as the text that labels and categories are compared by: 1, 1.0 and "1" are the same one."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating):
        return str(int(value)) if math.isfinite(value) and value == int(value) else str(float(value))
    return str(value).strip()


Label = Annotated[str, BeforeValidator(_declared_label)]
Labels = Annotated[tuple[Label, ...], Field(min_length=1)]


def _one_or_several(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


#: The column to predict, or several of yes and no, each a label of its own.
Target = Annotated[str | tuple[str, ...], BeforeValidator(_one_or_several)]


def names_of(target: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The columns to predict."""
    return (target,) if isinstance(target, str) else target or ()


def _delimiter(value: Any) -> Any:
    return "\t" if value in ("\\t", "tab") else value


def _codec(name: str) -> str:
    try:
        known = codecs.lookup(name).name
    except LookupError:
        raise ValueError("is not an encoding that Python knows, such as utf-8 or cp1252") from None
    return "utf-8-sig" if known == "utf-8" else name  # with or without a byte order mark


class CSVFormat(Strict):
    """How a CSV file is written: what separates its cells, its decimal mark, its encoding. Parquet needs none of it."""

    delimiter: Annotated[str, BeforeValidator(_delimiter), Field(min_length=1, max_length=1)] = ","
    decimal: Literal[".", ","] = "."
    encoding: Annotated[str, AfterValidator(_codec)] = "utf-8-sig"

    def points(self, cells: list[Any]) -> list[Any]:
        """Cells with a decimal point for the declared comma, and the reverse: what has the other mark is no number."""
        return cells if self.decimal == "." else [c.translate(_SWAPPED) if isinstance(c, str) else c for c in cells]


PLAIN = CSVFormat()


class _Ordered(Strict):
    """Values on a line, clamped to [min, max] and mapped to [−1, 1]. Missing is the middle, with an indicator of its own."""

    min: Any
    max: Any

    @model_validator(mode="after")
    def _check_order(self) -> _Ordered:
        if not self.min < self.max:
            raise ValueError("min must be less than max")
        return self

    @property
    def width(self) -> int:
        return 2

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest value, as numbers."""
        return self.min, self.max

    def values(self, cells: Sequence[Any]) -> Array:
        """Each cell as a number; NaN for one that is missing or cannot be read."""
        raise NotImplementedError

    def encode(self, cells: Sequence[Any]) -> Array:
        """[rows, 2]: the scaled value, and 1 where there is none."""
        return np.stack(scaled(self.values(cells), Bounds.check("bounds", self.range, 1)), axis=1)


class Numeric(_Ordered):
    """Numbers, clamped to [min, max] and mapped to [−1, 1]."""

    min: Annotated[float, Field(allow_inf_nan=False)]
    max: Annotated[float, Field(allow_inf_nan=False)]

    def values(self, cells: Sequence[Any]) -> Array:
        return numbers(cells)

    def describe(self) -> str:
        return f"{self.min:g} to {self.max:g}"


class Date(_Ordered):
    """Dates as days since ``min``, clamped to [min, max] and mapped to [−1, 1].

    ``format`` is that of ``strptime``, such as ``%d.%m.%Y``; without one a date is 2024-12-31, with a time or without.
    """

    min: date
    max: date
    format: str | None = None

    @property
    def range(self) -> tuple[float, float]:
        return 0.0, float((self.max - self.min).days)

    def values(self, cells: Sequence[Any]) -> Array:
        return np.fromiter((self._days(cell) for cell in cells), dtype=np.float64, count=len(cells))

    def _days(self, cell: Any) -> float:
        if is_missing(cell):
            return math.nan
        try:
            if isinstance(cell, str):
                text = cell.strip()
                cell = datetime.strptime(text, self.format) if self.format else datetime.fromisoformat(text)
            found = cell.date() if isinstance(cell, datetime) else cell
            return float((found - self.min).days)
        except (TypeError, ValueError, AttributeError):
            return math.nan

    def describe(self) -> str:
        return f"dates from {self.min} to {self.max}"


class Categorical(Strict):
    """One of the declared categories, one slot each; one slot for any other value, and one for a missing one."""

    categories: Labels

    @model_validator(mode="after")
    def _distinct(self) -> Categorical:
        if len(set(self.categories)) < len(self.categories):
            raise ValueError("a category is named twice")
        return self

    @property
    def width(self) -> int:
        return len(self.categories) + 2

    def encode(self, cells: Sequence[Any]) -> Array:
        """[rows, categories + 2]: exactly one 1 in a row."""
        out = np.zeros((len(cells), self.width))
        out[np.arange(len(cells)), [self.slot(cell) for cell in cells]] = 1.0
        return out

    def slot(self, cell: Any) -> int:
        where = find(cell, self.categories)
        return where if where is not None else len(self.categories) + is_missing(cell)

    def describe(self) -> str:
        return f"{', '.join(self.categories)}, or another"


def _filled_in(value: Any) -> Any:
    if isinstance(value, dict) and all(cell is None for cell in value.values()):
        raise ValueError("is not filled in: state min and max, or categories, or name the column under ignore or id")
    return value


def _which(value: Any) -> str:
    if isinstance(value, BaseModel):
        return type(value).__name__
    given = value if isinstance(value, dict) else {}
    if "categories" in given:
        return "Categorical"
    return "Date" if "format" in given or _is_date(given.get("min")) else "Numeric"


def _is_date(value: Any) -> bool:
    if isinstance(value, str):
        try:
            date.fromisoformat(value)
        except ValueError:
            return False
        return True
    return isinstance(value, date)


Column = Annotated[
    Annotated[Numeric, Tag("Numeric")] | Annotated[Date, Tag("Date")] | Annotated[Categorical, Tag("Categorical")],
    Discriminator(_which),
    BeforeValidator(_filled_in),
]


def scaled(values: Array, bounds: Bounds) -> tuple[Array, Array]:
    """Values in [−1, 1] with 0 in place of NaN, and where that was: row by row, by public numbers alone."""
    missing = np.isnan(values)
    return bounds.scale(np.where(missing, 0.0, values)) * ~missing, missing.astype(np.float64)


def find(cell: Any, labels: Sequence[str]) -> int | None:
    """Which of the labels a cell is; "1.0" is the label "1" if there is no label "1.0"."""
    text = "" if cell is None else label(cell)
    if text in labels:
        return labels.index(text)
    value = number(text)
    if math.isfinite(value) and value == int(value) and str(int(value)) in labels:
        return labels.index(str(int(value)))
    return None


def is_missing(cell: Any) -> bool:
    return cell is None or label(cell).lower() in MISSING


def number(cell: Any) -> float:
    """A cell as a number; NaN for one that is missing or is none."""
    if is_missing(cell):
        return math.nan
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def numbers(cells: Sequence[Any]) -> Array:
    """:func:`number` of each cell."""
    if all(type(cell) is str for cell in cells):
        try:
            return np.array(cells, dtype=np.float64)  # the same values, ten times faster, if every cell has one
        except ValueError:
            pass
    return np.fromiter((number(cell) for cell in cells), dtype=np.float64, count=len(cells))
