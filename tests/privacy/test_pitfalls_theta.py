"""Several θ-samples are one release, and leave the mean as it was.

Each is a known way in which a variational optimizer and a privacy engine have lost the guarantee together.
"""

from __future__ import annotations

import pytest
import torch
from private_runs import (
    EXAMPLES,
    C,
    alike,
    count,
    ivon,
    make,
    parameters,
)

from dpivon import PrivacyError


@pytest.mark.parametrize("samples", [2, 4])
def test_several_theta_samples_are_clipped_once_and_charged_once(mode, samples):
    run = make(mode, data=alike(), max_grad_norm=C, optimizer=ivon(mc_samples=samples, ess=1e8))
    for x, y in run.loader:
        for _ in range(samples):
            with run.optimizer.sampled_params(train=True):
                run.backward(x, y)
        run.optimizer.step()
    assert [count(total) for total in run.contributions] == [pytest.approx(EXAMPLES, rel=1e-3)]
    assert len(run.engine.accountant) == 1


def test_the_gradients_at_several_theta_samples_are_averaged(mode):
    sums = []
    for samples in (1, 3):
        run = make(mode, max_grad_norm=1e3, optimizer=ivon(mc_samples=samples, ess=1e14))
        x, y = next(iter(run.loader))
        for _ in range(samples):
            with run.optimizer.sampled_params(train=True):
                run.backward(x, y)
        run.optimizer.step()
        sums.append(run.contributions[0])
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-5)


def test_theta_samples_of_one_step_on_different_batches_are_refused(mode):
    run = make(mode, optimizer=ivon(mc_samples=2))
    x, y = next(iter(run.loader))
    with run.optimizer.sampled_params(train=True):
        run.backward(x, y)
    with pytest.raises(PrivacyError, match="different batches"), run.optimizer.sampled_params(train=True):
        run.backward(x.flip(0), y.flip(0))
    assert run.contributions == []


def test_entering_more_theta_samples_than_declared_is_refused(mode):
    run = make(mode, optimizer=ivon())
    x, y = next(iter(run.loader))
    with run.optimizer.sampled_params(train=True):
        run.backward(x, y)
    with pytest.raises(PrivacyError, match="mc_samples=1"), run.optimizer.sampled_params(train=True):
        run.backward(x, y)


def test_an_exception_inside_sampled_params_restores_the_mean(mode):
    run = make(mode, optimizer=ivon(ess=1.0))
    before = parameters(run)
    x, y = next(iter(run.loader))
    inside = []

    def fail() -> None:
        with run.optimizer.sampled_params(train=True):
            run.backward(x, y)
            inside.extend(parameters(run))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not torch.equal(before[0], inside[0])
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(run), strict=True))


def test_a_closure_that_samples_itself_is_sampled_and_clipped_once(mode):
    """Upstream's step(closure) does not sample, so people's closures do; the private one must not nest or pass twice."""
    run = make(mode, max_grad_norm=0.1)
    x, y = next(iter(run.loader))

    def closure():
        run.optimizer.zero_grad()
        with run.optimizer.sampled_params(train=True):
            loss = run.criterion(run.model(x), y)
            loss.backward()
        return loss

    run.optimizer.step(closure)
    assert len(run.engine.accountant) == 1
    (released,) = run.contributions
    assert float(released.norm()) <= len(x) * 0.1 * (1 + 1e-5)
