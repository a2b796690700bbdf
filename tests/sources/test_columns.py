"""What becomes of a cell: closed forms, and that no other row has any influence."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpivon.sources.columns import Categorical, Numeric, find, number

AGE = Numeric(min=0, max=120)
SEX = Categorical(categories=("f", "m"))
CELLS = st.one_of(st.none(), st.text(max_size=5), st.floats(), st.integers(-300, 300).map(str), st.booleans())


@pytest.mark.parametrize(
    ("cell", "value", "missing"),
    [
        ("0", -1, 0), ("120", 1, 0), ("60", 0, 0), ("90", 0.5, 0), ("-5", -1, 0), ("1e9", 1, 0), ("inf", 1, 0), ("-inf", -1, 0),
        ("", 0, 1), (" ", 0, 1), ("NA", 0, 1), ("nan", 0, 1), ("sixty", 0, 1), (None, 0, 1), (math.nan, 0, 1), (30, -0.5, 0),
        (" 30 ", -0.5, 0), ("?", 0, 1),
    ],
)  # fmt: skip
def test_a_number_is_clamped_and_scaled_and_a_missing_one_is_the_middle_with_an_indicator(cell, value, missing) -> None:
    assert AGE.encode([cell]).tolist() == [[value, missing]]


@pytest.mark.parametrize(
    ("cell", "slot"), [("f", 0), (" m ", 1), ("x", 2), ("F", 2), ("", 3), (None, 3), ("NA", 3), (1, 2)]
)
def test_a_category_has_one_slot_of_its_own(cell, slot) -> None:
    assert SEX.encode([cell]).tolist() == [[float(i == slot) for i in range(4)]]


def test_a_declared_category_may_be_called_what_otherwise_is_missing() -> None:
    assert Categorical(categories=("none", "some")).slot("none") == 0


@pytest.mark.parametrize("cell", ["1", 1, 1.0, "1.0", np.float32(1), " 1 "])
def test_codes_are_the_same_however_they_are_written(cell) -> None:
    assert find(cell, ("0", "1")) == 1


def test_a_text_is_found_before_its_number() -> None:
    assert find("1.0", ("1", "1.0")) == 1
    assert find(True, ("false", "true")) == 1
    assert find("inf", ("0", "1")) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(CELLS, min_size=1, max_size=8), st.lists(CELLS, max_size=8))
def test_the_code_of_a_row_does_not_depend_on_the_others(cells, others) -> None:
    for column in (AGE, SEX):
        together = column.encode([*others, *cells])[len(others) :]
        alone = np.concatenate([column.encode([cell]) for cell in cells])
        assert together.tobytes() == alone.tobytes()
        assert np.isfinite(together).all()
        assert (np.abs(together) <= 1).all()


@given(CELLS)
def test_a_number_is_a_number_or_nan(cell) -> None:
    assert isinstance(number(cell), float)
