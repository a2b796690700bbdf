"""The owner's look: every kind of mistake is found, plain tables pass, and a table's format is read as declared."""

from __future__ import annotations

from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clinic import HEADER, rows, write_csv
from dpivon import ArgumentError
from dpivon.sources import Declaration, files_of, kind_of, source_for
from dpivon.sources.columns import Categorical, Column, Date, Numeric, number, numbers
from dpivon.sources.owner import look_at_column, look_at_size, named_like_an_id

AGE, SEX = Numeric(min=0, max=100), Categorical(categories=("f", "m"))
SINCE = Date(min=date(2020, 1, 1), max=date(2022, 1, 1), format="%d.%m.%Y")


def problem(column: Column, cells: list[Any], name: str = "age", learning: bool = True) -> str:
    return look_at_column(name, column, cells, ",", learning).problem


@pytest.mark.parametrize(
    ("column", "cells", "words"),
    [
        (AGE, ["3,5", "80,25"], "2 of 2 cells are no numbers, most of them with a decimal ',': declare decimal: ','"),
        (AGE, ["abc"], "1 of 1 cells are no numbers"),
        (AGE, ["1"] * 8 + ["a lot"], "1 of 9 cells are no numbers"),
        (SINCE, ["2021-03-01"] * 3, "3 of 3 cells are no dates"),
        (AGE, ["250"] * 11 + ["30"] * 9, "11 of 20 values are outside 0 to 100"),
        (AGE, [""] * 20, "all 20 cells are missing"),
        (AGE, [str(i) for i in range(1, 41)], "looks like an identifier"),
        (SEX, ["w"] * 11 + ["m"] * 9, "11 of 20 values are none of its categories"),
        (SEX, [f"p{i}" for i in range(30)], "looks like an identifier"),
    ],
)
def test_a_column_that_is_not_as_declared_is_found(column: Column, cells: list[Any], words: str) -> None:
    assert problem(column, cells) == f"age: {words}" or words == "looks like an identifier"
    assert words in problem(column, cells)


@pytest.mark.parametrize(
    ("column", "cells"),
    [
        (AGE, ["1"] * 10 + ["a lot"]),  # less than a tenth
        (AGE, ["", "NA", None]),  # missing is no mistake, and three rows say little
        (AGE, [str(30 + i % 7) for i in range(40)]),
        (AGE, [f"{i * 2.5}" for i in range(40)]),
        (AGE, ["250"] * 3),
        (SEX, ["w"] * 3),
        (SEX, ["f", "m"] * 20),
        (SINCE, ["01.03.2021", "", datetime(2021, 5, 5, 13)]),
        (SINCE, [date(2020, 1, 1 + i) for i in range(30)]),
    ],
)
def test_a_plain_column_passes(column: Column, cells: list[Any]) -> None:
    assert problem(column, cells) == ""


def test_identifiers_are_found_by_name_and_distinct_whole_numbers() -> None:
    shuffled = np.random.default_rng(0).permutation(90)[:60].tolist()
    assert "looks like an identifier" in problem(AGE, shuffled, "patient_id")
    assert problem(AGE, shuffled, "score") == ""
    assert problem(AGE, [value + 0.5 for value in shuffled], "patient_id") == ""
    assert problem(AGE, shuffled, "patient_id", learning=False) == ""
    assert [name for name in ("id", "ID", "patientId", "pat-id", "MRN") if not named_like_an_id(name)] == []
    assert [name for name in ("humidity", "solid", "ideal", "paid", "video") if named_like_an_id(name)] == []


@pytest.mark.parametrize(("count", "wrong"), [(270, False), (269, True), (330, False), (331, True), (3000, True)])
def test_n_may_be_off_by_a_tenth(count: int, wrong: bool) -> None:
    assert bool(look_at_size(count, 300).problem) == wrong


def test_arrays_outside_their_range_are_found(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.full((5, 2), 200.0), y=np.zeros(5))
    where = str(tmp_path / "a.npz")
    one, other = (source_for(where, value_bounds=Numeric(min=0, max=top)).look(where) for top in (1, 255))
    assert one[0].problem == "10 of 10 values are outside 0 to 1"
    assert other[0].problem == ""


# ---- decimal commas, dates, encodings, several files


def test_the_format_changes_nothing_but_how_a_table_is_written(tmp_path: Path) -> None:
    """Semicolons, decimal commas and Latin-1: the same inputs to the bit."""
    table = rows(30)
    columns = {"age": AGE, "dose": Numeric(min=0, max=10), "sex": Categorical(categories=("f", "m"))}
    declared = {"columns": columns, "target": "ill", "ignore": ("note",)}
    plain = write_csv(tmp_path / "a.csv", table)
    text = plain.read_text().replace(".", "§").replace('"free, text"', "Größe").replace(",", ";").replace("§", ",")
    (tmp_path / "b.csv").write_text(text, encoding="cp1252")
    form = {"delimiter": ";", "decimal": ",", "encoding": "cp1252"}
    ours = source_for(str(plain), **declared)
    theirs = source_for(str(tmp_path / "b.csv"), **declared, **form)
    classes = ("yes", "no")
    one, other = ours.read(str(plain), classes), theirs.read(str(tmp_path / "b.csv"), classes)
    assert torch.equal(one.inputs, other.inputs)
    assert one.targets is not None
    assert torch.equal(one.targets, other.targets)
    assert not any(finding.problem for finding in theirs.look(str(tmp_path / "b.csv")))
    undeclared = source_for(str(tmp_path / "b.csv"), **declared, **form | {"decimal": "."})
    found = [finding.problem for finding in undeclared.look(str(tmp_path / "b.csv"))]
    assert "declare decimal: ','" in found[0]
    points = source_for(str(plain), **declared, decimal=",").look(str(plain))
    assert "most of them with a decimal '.'" in points[0].problem


@pytest.mark.parametrize("cell", ["01.01.2021", date(2021, 1, 1), datetime(2021, 1, 1, 23)])
def test_a_date_is_days_since_the_declared_first_one(cell: Any) -> None:
    days = (date(2022, 1, 1) - date(2020, 1, 1)).days
    assert SINCE.encode([cell, "01.01.1990", "01.01.2099", "soon", ""]).tolist() == [
        [pytest.approx(2 * 366 / days - 1), 0], [-1, 0], [1, 0], [0, 1], [0, 1],
    ]  # fmt: skip


def test_points_in_dates_are_no_decimal_marks(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("seen;crp;ill\n01.01.2021;1,5;yes\n")
    declared = {"seen": SINCE, "crp": Numeric(min=0, max=3)}
    where = str(tmp_path / "a.csv")
    read = source_for(where, columns=declared, target="ill", delimiter=";", decimal=",").read(where, ("yes", "no"))
    assert read.inputs.tolist() == [[pytest.approx(2 * 366 / 731 - 1), 0, 0, 0]]


def test_a_column_of_dates_is_declared_by_dates_and_read_back_from_json() -> None:
    declared = Declaration.model_validate({"columns": {"seen": {"min": date(2020, 1, 1), "max": "2021-01-01"}}})
    again = Declaration.model_validate(declared.model_dump(mode="json"))
    assert again == declared
    assert declared.columns["seen"].describe() == "dates from 2020-01-01 to 2021-01-01"
    assert declared.columns["seen"].encode(["2020-07-02 12:30"]).tolist() == [[0, 0]]


def test_several_files_are_one_table(tmp_path: Path) -> None:
    table = rows(10)
    whole = write_csv(tmp_path / "whole.csv", table)
    for i, part in enumerate((table[:4], table[4:])):
        write_csv(tmp_path / f"part-{i}.csv", part)
    columns = {"age": AGE, "sex": SEX}
    declared = {"columns": columns, "target": "ill", "ignore": ("note", "dose")}
    expected = source_for(str(whole), **declared).read(str(whole), ("yes", "no"))
    for where in (f"{tmp_path}/part-*.csv", f"{tmp_path}/part-0.csv,{tmp_path}/part-1.csv"):
        assert kind_of(where) == "table"
        assert len(files_of(where)) == 2
        found = source_for(where, **declared).read(where, ("yes", "no"))
        assert torch.equal(found.inputs, expected.inputs)
        assert found.names == expected.names
    with pytest.raises(ArgumentError, match="names a file twice"):
        kind_of(f"{tmp_path}/part-*.csv,{tmp_path}/part-1.csv")
    with pytest.raises(ArgumentError, match=r"other\.csv': does not exist"):
        kind_of(f"{tmp_path}/part-1.csv,{tmp_path}/other.csv")
    (tmp_path / "part-2.csv").write_text(",".join([*HEADER[:-1], "sick"]) + "\n")
    with pytest.raises(
        ArgumentError, match=r"part-2.csv': has other columns than .*: ill, sick is in one of them only"
    ):
        source_for(f"{tmp_path}/part-*.csv", **declared)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(st.none(), st.text(max_size=6), st.floats().map(str), st.floats()), max_size=6))
def test_the_fast_way_to_read_numbers_is_the_plain_one(cells: list[Any]) -> None:
    np.testing.assert_array_equal(numbers(cells), np.array([number(cell) for cell in cells], dtype=np.float64))
