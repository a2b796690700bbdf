"""A step with a closure is the step of the loop that enters the samples itself."""

from __future__ import annotations

import pytest
import torch
from ivon_runs import equal, loss_of, make, make_model, same_state, train, weights
from torch import Tensor

from dpivon import DpivonError


def test_a_closure_sees_samples_and_its_losses_are_averaged() -> None:
    model = make_model()
    optimizer = make(model, mc_samples=4)
    mean = weights(model)
    seen, losses = [], []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        seen.append(model[0].weight.detach().clone())
        losses.append(loss.detach())
        return loss

    result = optimizer.step(closure)
    assert len(seen) == 4
    assert all(not torch.equal(theta, mean[0]) for theta in seen)
    assert all(not torch.equal(seen[0], theta) for theta in seen[1:])
    torch.testing.assert_close(result.detach(), torch.stack(losses).mean())


@pytest.mark.parametrize("enters_context", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
def test_a_closure_gives_the_step_of_the_explicit_loop(samples: int, enters_context: bool) -> None:
    explicit_model, model = make_model(), make_model()
    explicit, optimizer = make(explicit_model, mc_samples=samples), make(model, mc_samples=samples)
    train(explicit_model, explicit, 3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        if enters_context:
            with optimizer.sampled_params(train=True):
                loss = loss_of(model)
                loss.backward()
        else:
            loss = loss_of(model)
            loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert equal(weights(model), weights(explicit_model))
    assert same_state(optimizer, explicit)


def test_a_closure_without_a_result_is_fine() -> None:
    model = make_model()
    optimizer = make(model, mc_samples=2)
    before = weights(model)

    def closure() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()

    assert optimizer.step(closure) is None
    assert not equal(weights(model), before)


def test_a_closure_that_fails_leaves_the_mean_and_the_optimizer_usable() -> None:
    model, reference_model = make_model(), make_model()
    optimizer, reference = make(model), make(reference_model)
    before = weights(model)

    def closure() -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert equal(weights(model), before)
    with pytest.raises(DpivonError, match="already inside"), optimizer.sampled_params(), optimizer.sampled_params(True):
        pass  # the nesting that only a running closure may do is an error again
    optimizer.generator.manual_seed(3)
    train(model, optimizer, 2)
    train(reference_model, reference, 2)
    assert equal(weights(model), weights(reference_model))
