"""A batch is released once and whole: parts, leftovers, empty ones, second steps, and the number that it is divided by.

Each is a known way in which a variational optimizer and a privacy engine have lost the guarantee together.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager as OpacusMemoryManager
from private_runs import (
    CLASSES,
    EXAMPLES,
    FEATURES,
    C,
    Run,
    alike,
    convnet,
    count,
    data,
    images,
    make,
    mlp,
    sgd,
)
from torch import nn

from dpivon import BatchMemoryManager, DpivonError, PrivacyError

MANAGERS = [BatchMemoryManager, OpacusMemoryManager]


def train_micro_batches(run: Run, batches: Any, fail_at: int, how: str) -> None:
    """Ordinary training on micro-batches, disturbed once at micro-batch ``fail_at``."""
    for k, (x, y) in enumerate(batches):
        run.optimizer.zero_grad()
        try:
            run.backward(x, y)
            if k == fail_at and how == "continue":
                raise RuntimeError("this micro-batch failed")
            run.optimizer.step()
        except RuntimeError:
            continue
        if k == fail_at and how == "break":
            break
        if k == fail_at and how == "exception":
            raise KeyboardInterrupt


@pytest.mark.campaign(keep=7)
@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("how", ["break", "exception", "continue"])
@pytest.mark.parametrize("fail_at", [0, 1])
def test_no_example_enters_a_release_twice_after_a_logical_batch_was_left(mode, manager, how, fail_at):
    run = make(mode, data=alike(), max_grad_norm=C)
    if how == "exception":
        with (
            pytest.raises(KeyboardInterrupt),
            manager(data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer) as batches,
        ):
            train_micro_batches(run, batches, fail_at, how)
    else:
        with manager(data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer) as batches:
            train_micro_batches(run, batches, fail_at, how)
    with manager(data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer) as batches:
        train_micro_batches(run, batches, -1, "no")
    for x, y in run.loader:
        run.step(x, y)
    counts = [count(total) for total in run.contributions]
    assert len(counts) >= 2
    assert max(counts) <= EXAMPLES * (1 + 1e-5)
    assert counts[-1] == pytest.approx(EXAMPLES, rel=1e-4)
    assert len(run.engine.accountant) == len(counts)


@pytest.mark.parametrize("manager", MANAGERS)
def test_undisturbed_micro_batches_give_the_sum_of_the_whole_batch(mode, manager):
    whole, split = make(mode), make(mode)
    expected = whole.release(*data())
    with manager(data_loader=split.loader, max_physical_batch_size=5, optimizer=split.optimizer) as batches:
        train_micro_batches(split, batches, -1, "no")
    assert len(split.contributions) == 1
    torch.testing.assert_close(split.contributions[0], expected, rtol=1e-5, atol=1e-6)


def test_opacus_memory_manager_with_workers_is_refused():
    run = make(workers=1)
    with (
        pytest.raises(PrivacyError, match=r"dpivon\.BatchMemoryManager"),
        OpacusMemoryManager(data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer) as batches,
    ):
        next(iter(batches))


@pytest.mark.parametrize("fail_at", [None, 0, 1, 2])
def test_our_memory_manager_with_workers_keeps_logical_batches_apart_even_after_an_error(fail_at):
    """Workers draw batches ahead, so that a draw does not say which logical batch is under way."""
    run = make(workers=1, data=alike(), batch_size=4, max_grad_norm=C)
    sizes, sum_of = [], []
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer) as batches:
        announce = run.optimizer.begin_micro_batch
        run.optimizer.begin_micro_batch = lambda *, first, last: (
            sizes.extend([0] * first),
            announce(first=first, last=last),
        )
        for k, (x, y) in enumerate(batches):
            sizes[-1] += len(x)
            run.optimizer.zero_grad()
            run.backward(x, y)
            if k == fail_at:
                continue  # after an error, say
            run.optimizer.step()
            sum_of += [sizes[-1]] * (len(run.contributions) - len(sum_of))
    counts = [count(total) for total in run.contributions]
    assert len(counts) == len(run.engine.accountant) == len(sum_of) >= len(run.loader) - 1
    assert all(released <= drawn * (1 + 1e-5) for released, drawn in zip(counts, sum_of, strict=True))
    if fail_at is None:
        assert counts == [pytest.approx(drawn, rel=1e-4, abs=1e-6) for drawn in sizes]


def test_leaving_our_memory_manager_drops_the_partial_sum(mode):
    run = make(mode)
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer) as batches:
        run.step(*next(iter(batches)))
        assert all(p.summed_grad is not None for p in run.optimizer.params)
    assert all(p.summed_grad is None for p in run.optimizer.params)


@pytest.mark.parametrize("manager", MANAGERS)
def test_stepping_twice_on_one_micro_batch_is_refused(mode, manager):
    run = make(mode, data=alike(), max_grad_norm=C)
    with manager(data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer) as batches:
        x, y = next(iter(batches))
        run.step(x, y)
        with pytest.raises(PrivacyError, match="twice on one micro-batch"):
            run.step(x, y)
    assert run.contributions == []
    assert len(run.engine.accountant) == 0


def test_an_error_while_summing_leaves_the_sum_of_the_earlier_micro_batches_whole(monkeypatch):
    run = make("bookkeeping", data=alike(), max_grad_norm=C)
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=6, optimizer=run.optimizer) as batches:
        for k, (x, y) in enumerate(batches):
            if k == 1:  # the second sum fails at its last parameter, and is tried again
                last = run.optimizer.params[-1]
                good, last.summed_grad = last.summed_grad, torch.zeros(99)
                with pytest.raises(RuntimeError):
                    run.step(x, y)
                last.summed_grad = good
            run.step(x, y)
    assert [count(total) for total in run.contributions] == [pytest.approx(EXAMPLES, rel=1e-4)]


def test_a_release_that_failed_leaves_nothing_for_the_next_one(mode):
    """As the loop in Opacus's documentation has it: zero_grad comes after step, and is jumped over by the error."""
    run = make(mode, data=alike(), max_grad_norm=C)
    run.noise.fail = True
    x, y = next(iter(run.loader))
    run.backward(x, y)
    with pytest.raises(RuntimeError, match="broken"):
        run.optimizer.step()
    run.noise.fail = False
    x, y = next(iter(run.loader))
    run.backward(x, y)
    run.optimizer.step()
    assert [count(total) for total in run.contributions] == [pytest.approx(EXAMPLES, rel=1e-4)]
    assert len(run.engine.accountant) == 2  # the failed one stays charged


def test_the_expected_batch_is_the_declared_one_not_one_floored_from_the_dataset():
    x, y = torch.zeros(50_000, FEATURES), torch.zeros(50_000, dtype=torch.long)
    run = make(data=(x, y), batch_size=4096)
    assert run.optimizer.expected_batch_size == 4096
    assert run.optimizer.spec.sample_rate == 4096 / 50_000
    assert len(run.loader) == 13
    declared = make(data=(x, y), batch_size=64, dataset_size=60_000, expected_batch_size=250.5)
    assert declared.optimizer.spec.divisor == 250.5
    assert declared.loader.sample_rate == declared.optimizer.spec.sample_rate == 250.5 / 60_000


def test_the_divisor_does_not_depend_on_the_batch_that_was_drawn(mode):
    run = make(mode, optimizer=sgd)
    run.noise.answer = torch.ones_like
    small = run.release(*(t[:2] for t in data()))
    grads = torch.cat([p.grad.flatten() for p in run.optimizer.params])
    torch.testing.assert_close(grads, ((small + 1.0) / EXAMPLES).float())


@pytest.mark.parametrize("wrap_model", [True, False])
@pytest.mark.parametrize("net", ["mlp", "conv"])
def test_an_empty_batch_still_releases_noise_and_is_charged(mode, wrap_model, net):
    batch, module = (images(), convnet()) if net == "conv" else (data(), mlp())
    run = make(
        mode, module=module, data=batch, expected_batch_size=1e-3, wrap_model=wrap_model, capture=False, optimizer=sgd
    )
    model = run.model if wrap_model else module
    x, y = next(iter(run.loader))
    assert len(x) == 0
    run.criterion(model(x), y).backward()
    run.optimizer.step()
    noise = torch.cat([p.grad.flatten() for p in run.optimizer.params]) * 1e-3
    assert len(run.engine.accountant) == 1
    assert noise.std() == pytest.approx(1.0, rel=0.3)


def test_stepping_twice_on_one_poisson_batch_is_refused(mode):
    run = make(mode)
    x, y = next(iter(run.loader))
    run.step(x, y)
    with pytest.raises(PrivacyError, match="twice on one Poisson batch"):
        run.step(x, y)
    assert len(run.contributions) == len(run.engine.accountant) == 1


def test_credit_for_a_skipped_batch_does_not_pay_for_a_second_release_of_another():
    run = make(data=data(40), batch_size=10)
    batches = iter(run.loader)
    next(batches)
    x, y = next(batches)
    run.step(x, y)
    with pytest.raises(PrivacyError, match="twice on one Poisson batch"):
        run.step(x, y)


def test_batches_drawn_ahead_by_workers_do_not_pay_for_a_second_release():
    run = make(data=data(40), batch_size=4, workers=1)
    batches = iter(run.loader)
    x, y = next(batches)
    run.step(x, y)
    with pytest.raises(PrivacyError, match="twice on one Poisson batch"):
        run.step(x, y)
    run.step(*next(batches))
    assert len(run.engine.accountant) == 2
    batches.close()


def test_a_step_without_zero_grad_is_refused(mode):
    run = make(mode, data=alike(), max_grad_norm=C)
    run.backward(*next(iter(run.loader)))
    run.optimizer.step()
    batch = next(iter(run.loader))

    def again() -> None:
        run.backward(*batch)
        run.optimizer.step()

    with pytest.raises((ValueError, RuntimeError), match=r"zero_grad|before step|accumulat|[Pp]rocessed"):
        again()
    assert [count(total) for total in run.contributions] == [pytest.approx(EXAMPLES, rel=1e-4)]


def test_two_backward_passes_before_a_step_are_refused_or_counted_once(mode):
    """In a micro-batch too, whose sum is not released at once."""
    run = make(mode, data=alike(), max_grad_norm=C)
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=6, optimizer=run.optimizer) as batches:
        for x, y in batches:
            run.optimizer.zero_grad()
            run.backward(x, y)
            refused = 0
            for action in (lambda x=x, y=y: run.backward(x, y), run.optimizer.step):
                try:
                    action()
                except (ValueError, RuntimeError):
                    refused += 1
            assert refused >= 1
    assert all(count(total) <= EXAMPLES * (1 + 1e-5) for total in run.contributions)


def test_gradients_of_two_passes_that_piled_up_all_the_same_are_not_summed():
    """Two backwards before a step are refused, whatever the caller does between them."""
    run = make("bookkeeping", module=nn.Sequential(nn.Linear(FEATURES, CLASSES)), data=alike(), max_grad_norm=C)
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=6, optimizer=run.optimizer) as batches:
        x, y = next(iter(batches))
        run.backward(x, y)
        run.backward(x, y)
        with pytest.raises(DpivonError, match="second forward and backward"):
            run.optimizer.step()
        assert all(p.summed_grad is None for p in run.optimizer.params)


@pytest.mark.parametrize("thaw", ["before backward", "after backward"])
@pytest.mark.parametrize("freeze", ["between parts", "after backward"])
def test_a_parameter_that_was_frozen_brings_nothing_of_an_earlier_batch_into_a_release(mode, freeze, thaw):
    run = make(mode, data=alike(), max_grad_norm=C, optimizer=sgd)
    (x, y), frozen = alike(), run.optimizer.params[-2]
    next(iter(run.loader))
    if freeze == "between parts":
        run.optimizer.signal_skip_step(True)
        run.optimizer.signal_skip_step(False)
        run.step(x, y)
        frozen.requires_grad_(False)
        run.step(x, y)
    else:
        run.backward(x, y)
        frozen.requires_grad_(False)
        run.optimizer.step()
    next(iter(run.loader))
    run.optimizer.zero_grad()
    frozen.requires_grad_(thaw == "before backward")
    run.backward(x[:1], y[:1])
    frozen.requires_grad_(True)
    before = len(run.noise.sums)
    run.optimizer.step()
    assert count(torch.cat([s.flatten() for s in run.noise.sums[before:]])) <= 1 + 1e-5
    if thaw == "after backward":
        assert not run.noise.sums[before:][-2].any()
