"""Which part of a logical batch comes next, by itself: what is announced, what is queued, what is refused."""

from __future__ import annotations

import pytest

from dpivon import PrivacyError
from dpivon.privacy.logical_batch import LogicalBatch
from dpivon.privacy.mechanism import NoiseSpec

SPEC = NoiseSpec(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=8.0, sample_rate=0.1)


def part(batch: LogicalBatch, spec: NoiseSpec = SPEC) -> bool:
    """A step as the optimizer makes it. Whether it was the last."""
    batch.check(spec, drawn=True)
    batch.spec, batch.is_summed = spec, True
    if batch.more_follow():
        batch.goes_on = True
        return False
    batch.end()
    return True


def test_without_a_word_every_step_is_a_batch():
    batch = LogicalBatch()
    assert [part(batch) for _ in range(3)] == [True, True, True]


def test_announced_parts_end_with_the_last_one_and_queued_flags_are_not_asked():
    batch = LogicalBatch()
    batch.flags += [False]
    ends = []
    for last in (False, False, True):
        batch.announce(last=last)
        ends.append(part(batch))
    assert ends == [False, False, True]
    assert batch.flags == [False]


def test_queued_flags_are_used_in_order_and_a_look_takes_none():
    batch = LogicalBatch()
    batch.flags += [True, True, False]
    assert batch.more_follow(take=False)
    assert [part(batch) for _ in range(3)] == [False, False, True]
    assert batch.flags == []


@pytest.mark.parametrize("announced", [True, False])
def test_a_part_that_is_summed_already_is_refused(announced):
    batch = LogicalBatch()
    if announced:
        batch.announce(last=False)
    else:
        batch.flags += [True]
    part(batch)
    with pytest.raises(PrivacyError, match="twice on one micro-batch"):
        part(batch)
    batch.announce(last=True)
    assert part(batch)


def test_another_bound_is_refused_inside_a_batch_only():
    batch, other = LogicalBatch(), SPEC.replace(max_grad_norm=2.0)
    batch.flags += [True, False]
    part(batch)
    with pytest.raises(PrivacyError, match="in the middle of a logical batch"):
        part(batch, other)
    assert part(batch)
    assert part(batch, other)


def test_abandoning_says_whether_anything_may_be_summed_and_forgets_what_was_said():
    batch = LogicalBatch()
    assert not batch.abandon()
    batch.flags += [True, True]
    part(batch)
    assert batch.abandon()
    assert (batch.flags, batch.is_last, batch.goes_on) == ([], None, False)
    assert batch.abandon()  # until the sum is dropped, as the optimizer does
    batch.spec = None
    assert not batch.abandon()
    batch.announce(last=True)
    batch.spec = SPEC  # and a release that failed
    assert batch.abandon()
