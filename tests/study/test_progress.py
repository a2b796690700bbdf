"""What people see while a study runs."""

from __future__ import annotations

import io
import sys

import pytest

from dpivon.study import progress as module
from dpivon.study.progress import Progress


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_plain_lines_have_share_throughput_and_time_left(clock, capsys):
    with Progress(20_000.0, 4_000.0, every=10.0) as progress:
        progress.skip(1_000.0)  # restored from a checkpoint: done, but not by this process
        clock.now = 10.0
        progress.advance(5_000.0, lambda: "stack 1 of 2, ε 0.5")
        clock.now = 12.0
        progress.advance(1_000.0, lambda: pytest.fail("words made though nobody reads them"))
    line = capsys.readouterr().err
    assert line == " 50.0 % · stack 1 of 2, ε 0.5 · 500/s · 0:00:20 left\n"


def test_an_evaluation_is_shown_and_promises_no_end(clock, capsys):
    """All examples are trained on, by this process or by an earlier one; what is left is not counted in examples."""
    for done in (0.0, 10_000.0):
        with Progress(10_000.0, done) as progress:
            clock.now += 10.0
            progress.skip(0.0)
            progress.advance(10_000.0 - done, lambda: "trained")
            clock.now += 15.0
            progress.advance(0.0, lambda: "evaluating run 2 of 9")
    assert capsys.readouterr().err.splitlines() == [
        "100.0 % · trained · 1,000/s",
        "100.0 % · evaluating run 2 of 9 · 400/s",
        "100.0 % · trained",
        "100.0 % · evaluating run 2 of 9",
    ]


def test_quiet_says_nothing(clock, capsys):
    with Progress(10.0, 0.0, quiet=True) as progress:
        clock.now = 100.0
        progress.advance(5.0, lambda: "x")
        progress.say("y")
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_and_a_terminal_without_rich_gets_lines(clock, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for rich in (True, False):
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setenv("COLUMNS", "120")
        if not rich:
            monkeypatch.setitem(sys.modules, "rich.progress", None)
        with Progress(100.0, 0.0) as progress:
            clock.now += 20.0
            progress.advance(25.0, lambda: "stack 1 of 2")
        assert "stack 1 of 2" in screen.getvalue()
        assert " 25.0 %" in screen.getvalue()
        assert ("━" in screen.getvalue()) == rich
