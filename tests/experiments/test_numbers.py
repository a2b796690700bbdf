"""Marked numbers of the pages are what their tables give, and a page that says something else is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import numbers as measured

from experiments import numbers


def test_every_page_says_what_its_tables_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["numbers", "--check"])
    numbers.main()


def test_a_number_that_was_changed_is_put_right_and_its_line_breaks_are_kept() -> None:
    right = numbers.draws("lower")
    kept = f"Lower in <!--n:draws lower-->{right.replace(' ', chr(10))}<!--/n--> cases."
    assert numbers.written(kept) == kept
    wrong = f"Lower in <!--n:draws lower-->{right.replace('of', 'in')}<!--/n--> cases."
    assert numbers.written(wrong) == f"Lower in <!--n:draws lower-->{right}<!--/n--> cases."


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A <!--n:what-->1<!--/n-->", "'what' is not"),
        ("<!--n:gain-->1", "not closed"),
        ("<!--n:gain-->1<!--/n-->", "begins a line"),
    ],
)
def test_marks_that_mean_nothing_are_refused(text: str, words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        numbers.written(text, "page")


def test_numbers_follow_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """DP-Adam's iterates lose one point in every run: so does what the page says."""
    before = numbers.differences(["iterates"], ["dp-adam"], "accuracy", 100.0)
    t = numbers.Table(numbers.ROOT / "experiments/posterior/results/rows.csv")
    for row in t.rows:
        if row["method"] == "dp-adam" and row["predictor"] == "iterates" and row["accuracy"]:
            row["accuracy"] = str(float(row["accuracy"]) - 0.01)
    monkeypatch.setattr(numbers, "posterior", lambda: t)
    after = numbers.differences(["iterates"], ["dp-adam"], "accuracy", 100.0)
    assert [a.mean for a in after] == pytest.approx([b.mean - 1.0 for b in before])


def test_a_bar_has_its_means_in_order() -> None:
    scope = "CIFAR-10_at_ε_=_1,_3_and_7.5"
    first, second = (numbers.NUMBERS["bar"]("1a", scope, "2", place) for place in "01")
    assert numbers.NUMBERS["better"](scope, "2", "validation") == first.replace(" ", " points ", 1)
    assert numbers.NUMBERS["better"](scope, "2") == second.replace(" ", " points ", 1)


def test_areas_are_the_pages() -> None:
    """A Field makes them for the comparison, over all its choices: the same numbers."""
    scope = "the_paper's_σ_and_b_on_CIFAR-10_at_another_C"
    for place, rival in enumerate(("dp-sgd", "dp-adam")):
        assert numbers.NUMBERS["area"](rival, "2") == numbers.NUMBERS["bar"]("1c", scope, "2", str(place))


def test_a_predictor_at_one_epsilon() -> None:
    shown = numbers.iterates("dp-adam").split(" points")[0].split(" / ")
    assert [numbers.one("iterates", "dp-adam", e, "accuracy", "2") for e in numbers.posterior().epsilons] == shown


def test_new_rows_of_transformers_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column per contender that was measured, a dash where one was not, compiled steps at the end."""
    common = {"model": "gpt2", "shape": "2x8", "room": 1.5}
    rows = [
        {**common, "contender": "compiled-plain", "ms": 1.0, "ratio": 1.0},
        {**common, "contender": "compiled-ivon", "ms": 2.0, "ratio": 2.0},
        {**common, "contender": "opacus-ghost", "ms": 12.0, "ratio": 3.0},
        {**common, "contender": "plain", "ms": 4.0, "ratio": 1.0},
    ]
    (tmp_path / "transformers-h200.json").write_text(json.dumps({"commit": "abc", "rows": rows}))
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    eager, compiled = measured.transformer_table().strip().splitlines()[2:]
    assert eager == "| GPT-2, 2 × 8 | 4.0 | – | 3.00 · 1.50 | abc |"
    assert compiled == "| GPT-2, 2 × 8, compiled | 1.0 | 2.00 · 1.50 | – | abc |"
    assert numbers.NUMBERS["transformer"]("gpt2", "2x8", "opacus-ghost", "ratio", ".1f") == "3.0"
