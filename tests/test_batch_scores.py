"""Scores of many sets at once are those of the library, set by set."""

from __future__ import annotations

import math

import pytest
import torch

from dpivon import metrics
from dpivon.machine import one_thread
from dpivon.metrics import batch_scores
from dpivon.study.results.table import SCORES


def sets(n, classes=5):
    """Unsure, sure, certain (and sometimes wrong), all alike, and rounded so that many confidences are equal."""
    generator = torch.Generator().manual_seed(n)
    logits = torch.randn(5, n, classes, generator=generator) * torch.tensor([0.5, 3.0, 300.0, 0.0, 2.0]).view(-1, 1, 1)
    probs = logits.softmax(-1)
    tenths = (probs[4] * 10).round() + 0.5
    probs[4] = tenths / tenths.sum(-1, keepdim=True)
    return probs, torch.randint(0, classes, (5, n), generator=generator)


@pytest.mark.parametrize("n", [1, 20, 37, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_are_those_of_the_library_set_by_set(n, dtype):
    probs, labels = sets(n)
    probs = probs.to(dtype)
    found = batch_scores(probs, labels)
    assert found[2]["nll"] > 5  # a certain mistake costs what it costs there, not infinity
    for mine, p, y in zip(found, probs, labels, strict=True):
        assert set(mine) == {*SCORES}
        for name in SCORES:
            assert mine[name] == pytest.approx(getattr(metrics, name)(p, y), rel=1e-12, abs=1e-14), name


def test_one_row_of_labels_serves_all_sets_and_a_lost_set_takes_no_other_with_it():
    probs, labels = sets(50)
    whole = batch_scores(probs, labels[0])
    probs[1, 7, 2] = math.nan
    probs[3] = math.inf
    found = batch_scores(probs, labels[0])
    assert set(found[0]) == set(SCORES)
    assert [all(math.isnan(v) for v in scores.values()) for scores in found] == [False, True, False, True, False]
    assert all(found[i] == whole[i] for i in (0, 2, 4))


def test_threads_are_few_inside_and_as_before_afterwards():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inside = []

        @one_thread()
        def fails():
            inside.append(torch.get_num_threads())
            raise RuntimeError("inside")

        with pytest.raises(RuntimeError, match="inside"):
            fails()
        assert inside == [1]
        assert torch.get_num_threads() == 2
        probs, labels = sets(20)
        batch_scores(probs, labels)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
