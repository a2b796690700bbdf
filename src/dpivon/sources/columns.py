"""A column of a table as its owner declares it, and what becomes of a cell.

The encoding of a row is a function of that row and of declared, public numbers. No other row has any influence on it: there
is no mean, no deviation, no quantile and no list of values that occur.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from dpivon.bounds import Bounds

Array = np.ndarray[Any, Any]

#: Texts that stand for a missing value, unless a column declares one of them as a category. A public list.
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _declared_label(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        raise ValueError("YAML reads this as a truth value or as nothing; put it in quotes")
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


class Numeric(Strict):
    """Numbers, clamped to [min, max] and mapped to [−1, 1]. Missing is the middle, with an indicator of its own."""

    min: Annotated[float, Field(allow_inf_nan=False)]
    max: Annotated[float, Field(allow_inf_nan=False)]

    @model_validator(mode="after")
    def _ordered(self) -> Numeric:
        if not self.min < self.max:
            raise ValueError("min must be less than max")
        return self

    @property
    def width(self) -> int:
        return 2

    def encode(self, cells: Sequence[Any]) -> Array:
        """[rows, 2]: the scaled value, and 1 where there is none."""
        values = np.fromiter((number(cell) for cell in cells), dtype=np.float64, count=len(cells))
        return np.stack(scaled(values, Bounds.check("bounds", (self.min, self.max), 1)), axis=1)

    def told(self) -> str:
        return f"{self.min:g} to {self.max:g}"


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

    def told(self) -> str:
        return f"{', '.join(self.categories)}, or another"


def _which(value: Any) -> str:
    names = value if isinstance(value, dict) else type(value).model_fields if isinstance(value, BaseModel) else {}
    return "categorical" if "categories" in names else "numeric"


Column = Annotated[
    Annotated[Numeric, Tag("numeric")] | Annotated[Categorical, Tag("categorical")], Discriminator(_which)
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
