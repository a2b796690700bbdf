"""What people see while a study runs."""

from __future__ import annotations

import io
import sys

import pytest

from dpivon.study.run import progress as module
from dpivon.study.run.progress import Left, Pace, Progress


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


def test_neither_training_nor_evaluation_is_slower_for_the_other(clock, capsys):
    """Two stacks of two runs: 5,000 examples in 10 s each, and 40 s for a run's 100 passes, of which only half were passes."""

    def train(words):
        clock.now += 10.0
        progress.advance(5_000.0, lambda: words)

    def look(left, pace):
        progress.evaluating(Left(100.0 * left, left, pace), lambda: f"evaluating, {left} left")

    with Progress(10_000.0, 0.0, runs=4, every=0.0) as progress:
        train("first")
        for stack in range(2):
            pace = Pace()
            look(2, pace)
            for left in (1, 0):
                clock.now += 40.0
                pace.add(100.0, 20.0)
                look(left, pace)
            if stack == 0:
                train("second")
    assert capsys.readouterr().err.splitlines() == [
        " 50.0 % · first · 500/s · 0:00:10 left, evaluation not counted",
        " 50.0 % · evaluating, 2 left",
        " 50.0 % · evaluating, 1 left · 5 passes/s · 0:00:20 for this stack · 0:01:50 left",
        " 50.0 % · evaluating, 0 left · 5 passes/s · 0:00:00 for this stack · 0:01:30 left",
        "100.0 % · second · 500/s · 0:01:20 left",
        "100.0 % · evaluating, 2 left",
        "100.0 % · evaluating, 1 left · 5 passes/s · 0:00:20 for this stack",
        "100.0 % · evaluating, 0 left · 5 passes/s · 0:00:00 for this stack",
    ]


def test_words_without_examples_take_no_time_from_training(clock, capsys):
    """As a driver of several workers hears them: some train, some say something else."""
    with Progress(10_000.0, 0.0, every=0.0) as progress:
        for examples in (1_000.0, 0.0, 0.0, 1_000.0, 0.0):
            clock.now += 1.0
            progress.advance(examples, lambda: "at work")
    rates = [line.split(" · ")[2] for line in capsys.readouterr().err.splitlines()]
    assert rates == ["1,000/s", "1,000/s", "1,000/s", "500/s", "500/s"]


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
