"""An evaluation that is stopped, interrupted or out of memory goes on, and training is not repeated."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_study import FAST, PLAN, compare

from dpivon.errors import DpivonError
from dpivon.stacked import Stack
from dpivon.study.results.folder import status_lines
from dpivon.study.run import evaluation, runner
from dpivon.study.run.evaluation import predict_row
from dpivon.study.run.progress import Progress
from dpivon.study.run.runner import run_study
from dpivon.study.run.settings import Outcome

PAIR = replace(FAST, stack=2, only="-b64-")  # one stack of two runs


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    out = tmp_path_factory.mktemp("pair")
    assert run_study(PLAN, out, PAIR).finished == 2
    return out


def ask_to_stop():
    os.kill(os.getpid(), signal.SIGINT)


def interrupt():
    ask_to_stop()
    ask_to_stop()  # at once


def crash():
    raise RuntimeError("the machine died")


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize(
    ("happens", "raised"), [(ask_to_stop, None), (interrupt, KeyboardInterrupt), (crash, RuntimeError)]
)
def test_an_evaluation_that_is_stopped_goes_on_and_the_training_is_not_repeated(
    pair, tmp_path, monkeypatch, happens, raised
):
    calls = []

    def disturbed(*args, **kwargs):
        calls.append(1)
        happens()
        return predict_row(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "predict_row", disturbed)
        if raised is None:
            assert run_study(PLAN, tmp_path, PAIR) == Outcome(
                1, 3, signal.SIGINT, left=1
            )  # what was looked at has its row
        else:
            with pytest.raises(raised):
                run_study(PLAN, tmp_path, PAIR)
    assert len(calls) == 1  # the second run was not begun
    assert "24 releases charged" in "\n".join(status_lines(tmp_path))
    monkeypatch.setattr(Stack, "train", lambda *a: pytest.fail("trained again"))
    assert run_study(PLAN, tmp_path, PAIR).finished == 2
    compare(tmp_path, pair, exact=True)


def test_an_evaluation_that_does_not_fit_keeps_its_stack(pair, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "predict_row", full)
        with pytest.raises(
            DpivonError, match=r"stacks/0000: the evaluation does not fit.*kept.*more of the GPU is free"
        ):
            run_study(PLAN, tmp_path, PAIR)
    monkeypatch.setattr(Stack, "train", lambda *a: pytest.fail("trained again"))
    assert run_study(PLAN, tmp_path, PAIR).finished == 2
    compare(tmp_path, pair, exact=True)


def test_every_run_that_is_evaluated_is_shown(pair, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(Progress, "evaluating", lambda self, left, where: shown.append((left.runs, where())))
    monkeypatch.setattr(Progress, "say", lambda self, line: shown.append(line))
    run_study(PLAN, tmp_path, PAIR)
    title = "tiny 1/1: 2×b64"
    assert shown == [
        (2, f"{title} · evaluating run 1 of 2"),
        (1, f"{title} · evaluating run 2 of 2"),
        (0, f"{title} · evaluating run 2 of 2"),
    ]


def test_time_may_run_out_in_an_evaluation_but_every_call_gets_on(pair, tmp_path, monkeypatch):
    """An hour passes with every run that is evaluated, and half of one is allowed, or none."""
    passed, calls = [0.0], []

    def slow(*args, **kwargs):
        calls.append(1)
        passed[0] += 3600
        return predict_row(*args, **kwargs)

    monkeypatch.setattr(evaluation, "predict_row", slow)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0]))
    hasty = replace(PAIR, minutes=30)
    assert run_study(PLAN, tmp_path, hasty).finished == 1
    assert len(calls) == 1
    monkeypatch.setattr(Stack, "train", lambda *a: pytest.fail("trained again"))
    assert run_study(PLAN, tmp_path, replace(hasty, minutes=1e-9)).finished == 2
    assert len(calls) == 2
    compare(tmp_path, pair, exact=True)
