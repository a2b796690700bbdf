"""The judge itself: a path that clips right passes, and every way to go wrong gets its own name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
from all_cases import CASES
from harness import Verdict, clip, judge, reference
from runners import Seen
from table import markdown
from torch import Tensor

from dpivon.errors import PrivacyError

CASE = CASES["two linear layers"]


def a_path(of_rows: Callable[[Tensor, float], Tensor], state: Callable[[int], Any] = lambda n: 0) -> Any:
    """A runner whose sum is of_rows(the gradients of the rows that are there, C)."""

    def run(case: Any, batch: Any, worlds: Any, bound: float) -> list[Seen]:
        gradients = reference(case, batch, "own loop")
        assert gradients is not None
        return [Seen([of_rows(gradients[list(rows)], bound)], {"kept": state(len(rows))}, []) for rows in worlds]

    return run


def right(rows: Tensor, bound: float) -> Tensor:
    return clip(CASE, rows, bound).sum(0)


def refusing(sentence: str, after: int = 0) -> Any:
    calls = []

    def run(*args: Any) -> list[Seen]:
        calls.append(1)
        if len(calls) > after:
            raise PrivacyError(sentence)
        return a_path(right)(*args)

    return run


CLEAR = "module.0=Linear: is a test. Use another."
PATHS = {
    "right": a_path(right),
    "silent, not clipped": a_path(lambda rows, bound: 2 * rows.sum(0)),
    "silent, divided by the batch": a_path(lambda rows, bound: 9 * right(rows, bound) / len(rows)),
    "silent, slightly above C": a_path(lambda rows, bound: right(rows, bound * (1 + 3e-5))),
    "silent, state is left": a_path(right, state=lambda n: torch.tensor(float(n))),
    "wrong, half of it": a_path(lambda rows, bound: right(rows, bound) / 2),
    "refused": refusing(CLEAR),
    "late": refusing(CLEAR, after=1),
    "unclear, no remedy": refusing("module.0=Linear: is a test."),
    "unclear, no name": refusing("Something is a test. Use another."),
}


@pytest.mark.parametrize("name", PATHS)
def test_every_outcome_has_its_verdict(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(harness.RUNNERS, "own loop", PATHS[name])
    assert judge(CASE, "own loop").kind == name.split(",")[0]


def test_an_error_that_is_not_ours_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any) -> list[Seen]:
        raise KeyError("x")

    monkeypatch.setitem(harness.RUNNERS, "own loop", run)
    assert judge(CASE, "own loop").kind == "crash"


def test_the_table_numbers_what_refusals_say() -> None:
    said = {
        "own loop": Verdict("right"),
        "fit": Verdict("refused", "a|b at 0x7f0123456789. Use c."),
        "ddp": Verdict("—"),
    }
    table = markdown(lambda name, path: said.get(path, Verdict("silent", "", 2.5)))
    row = next(line for line in table.splitlines() if line.startswith("| two linear layers |"))
    assert row == "| two linear layers | — | right | refused (1) | **silent (2.5 C)** | — |"
    assert table.endswith("1. a\\|b at 0x…. Use c.")
