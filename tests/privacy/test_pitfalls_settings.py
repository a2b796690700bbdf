"""σ and C mean one thing at a time: schedulers, hooks, and what is refused or recorded as not private.

Each is a known way in which a variational optimizer and a privacy engine have lost the guarantee together.
"""

from __future__ import annotations

import math

import pytest
import torch
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from private_runs import (
    EXAMPLES,
    alike,
    count,
    data,
    make,
    sgd,
)

import dpivon
from dpivon import ArgumentError, BatchMemoryManager, PrivacyError, PrivacyWarning


def test_a_clip_scheduler_changes_the_bound_that_is_really_used(mode):
    run = make(mode, data=alike(), max_grad_norm=1.0)
    scheduler = ExponentialGradClip(run.optimizer, gamma=0.1)
    for bound in (1.0, 0.1, 0.01):
        total = run.release(*alike())
        assert count(total, bound) == pytest.approx(EXAMPLES, rel=1e-3)
        assert run.noise.stds[-1] == pytest.approx(bound)
        scheduler.step()


def test_a_noise_scheduler_changes_noise_correction_and_account_together(mode):
    run = make(mode, noise_multiplier=2.0, max_grad_norm=0.5)
    scheduler = ExponentialNoise(run.optimizer, gamma=0.5)
    for sigma in (2.0, 1.0, 0.5):
        run.release(*data())
        assert run.noise.stds[-1] == pytest.approx(sigma * 0.5)
        assert run.optimizer.last_release.variance == pytest.approx((sigma * 0.5 / EXAMPLES) ** 2)
        assert run.engine.accountant.history[-1] == (pytest.approx(sigma), 1.0, 1)
        scheduler.step()


@pytest.mark.parametrize("change", [{"noise_multiplier": 9.0}, {"max_grad_norm": 9.0}])
def test_a_scheduler_in_the_middle_of_a_logical_batch_is_refused(mode, change):
    run = make(mode)
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer) as batches:
        passing = iter(batches)
        run.step(*next(passing))
        for name, value in change.items():
            setattr(run.optimizer, name, value)
        with pytest.raises(PrivacyError, match="middle of a logical batch"):
            run.step(*next(passing))
    assert run.contributions == []


def test_a_second_step_hook_displaces_neither_the_first_nor_the_account(mode):
    run = make(mode)
    seen = []
    run.optimizer.attach_step_hook(lambda o: seen.append("first"))
    run.optimizer.attach_step_hook(lambda o: seen.append("second"))
    run.release(*data())
    assert seen == ["first", "second"]
    assert len(run.engine.accountant) == 1


def test_torch_step_hooks_and_learning_rate_schedulers_work(mode):
    run = make(mode, optimizer=sgd)
    seen = []
    run.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    run.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.5)
    run.release(*data())
    scheduler.step()
    assert seen == ["before", "after"]
    assert run.inner.param_groups[0]["lr"] == pytest.approx(0.05)
    assert len(run.engine.accountant) == 1


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("options", [{"poisson_sampling": False}, {"noise_multiplier": 0.0}])
def test_training_without_a_guarantee_says_so_and_costs_infinity(mode, options):
    with pytest.warns(PrivacyWarning, match="not differentially private"):
        run = make(mode, **options)
    for x, y in run.loader:
        run.step(x, y)
    with pytest.warns(PrivacyWarning, match="infinite"):
        assert run.engine.get_epsilon(1e-5) == math.inf


def test_one_noiseless_release_among_private_ones_costs_infinity():
    run = make()
    run.release(*data())
    run.optimizer.noise_multiplier = 0.0
    run.release(*data())
    run.optimizer.noise_multiplier = 1.0
    run.release(*data())
    with pytest.warns(PrivacyWarning, match="infinite"):
        assert run.engine.get_epsilon(1e-5) == math.inf


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_a_clipping_bound_that_bounds_nothing_is_refused(bound):
    with pytest.raises(ArgumentError, match=f"max_grad_norm={bound}"):
        make(max_grad_norm=bound)
    run = make(max_grad_norm=1.0)
    with pytest.raises(ArgumentError, match=f"max_grad_norm={bound}"):
        run.optimizer.max_grad_norm = bound
    assert run.optimizer.max_grad_norm == run.optimizer.clipping.sensitivity == 1.0


def test_a_random_batch_in_place_of_an_empty_one_is_refused():
    with pytest.raises(ArgumentError, match="rand_on_empty=True"):
        make(rand_on_empty=True)


def test_adaptive_clipping_is_refused_by_name():
    with pytest.raises(ArgumentError, match=r"clipping='adaptive'.*second release"):
        make(clipping="adaptive")


@pytest.mark.parametrize("call", ["make_private", "make_private_with_epsilon"])
def test_a_misspelt_keyword_is_a_type_error(call):
    budget = {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 1, "noise_multiplier": None}
    engine = dpivon.PrivacyEngine()
    with pytest.raises(TypeError, match="clippping"):
        make(engine=engine, call=getattr(engine, call), clippping="per_layer", **(budget if "eps" in call else {}))
    with pytest.raises(TypeError, match="acountant"):
        dpivon.PrivacyEngine(acountant="rdp")
