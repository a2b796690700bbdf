"""A θ-sample stands in for the mean inside ``sampled_params``, and leaves nothing behind, whatever happens there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ivon_runs import X, equal, loss_of, make, make_model, same_state, train, weights
from torch import Tensor, nn

from dpivon import IVON, DpivonError


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_restored_exactly_whatever_happens_inside(
    dtype: torch.dtype, training: bool, error: type[BaseException]
) -> None:
    model = make_model(dtype)
    optimizer = make(model)
    train(model, optimizer, 1)
    before, posterior = weights(model), optimizer.posterior()

    def fail() -> None:
        assert not equal(weights(model), before)
        raise error

    with pytest.raises(error), optimizer.sampled_params(train=training):
        fail()
    assert equal(weights(model), before)
    assert all(torch.equal(m, posterior.mean[name]) for name, m in optimizer.posterior().mean.items())
    with optimizer.sampled_params(train=training):
        assert not equal(weights(model), before)
    assert equal(weights(model), before)


def test_weights_are_restored_where_the_parameters_are_whatever_memory_they_were_given() -> None:
    """The room that holds the mean meanwhile is kept between blocks; parameters may be moved between them, and inside."""
    model = make_model()
    optimizer = make(model)
    train(model, optimizer, 1)
    with torch.inference_mode(), optimizer.sampled_params():  # a prediction makes the room that training writes to
        model(X)
    before = weights(model)
    with optimizer.sampled_params(train=True):
        for p in model.parameters():
            p.data = p.data.clone()
    assert equal(weights(model), before)
    model.double()
    before = weights(model)
    with optimizer.sampled_params():
        assert not equal(weights(model), before)
    assert equal(weights(model), before)
    next(model.parameters()).requires_grad_(False)  # one less to keep
    with optimizer.sampled_params():
        assert not equal(weights(model)[1:], before[1:])
    assert equal(weights(model), before)


def test_a_sample_that_failed_is_used_again_and_counts_once() -> None:
    model, reference_model = make_model(), make_model()
    optimizer, reference = make(model, mc_samples=2), make(reference_model, mc_samples=2)
    with optimizer.sampled_params(train=True):
        loss_of(model).backward()

    def fail_after_backward() -> None:
        loss_of(model).backward()
        raise RuntimeError

    with pytest.raises(RuntimeError), optimizer.sampled_params(train=True):
        fail_after_backward()
    optimizer.zero_grad()
    with optimizer.sampled_params(train=True):
        loss_of(model).backward()
    optimizer.step()
    train(reference_model, reference, 1)
    assert equal(weights(model), weights(reference_model))


def test_what_a_failed_sample_left_behind_is_not_learned_from() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = IVON([p, q], lr=0.1, ess=1.0, mc_samples=2, curvature="gradsq", beta1=0.0, beta2=1.0, weight_decay=0.0)
    with optimizer.sampled_params(train=True):
        (3.0 * p).sum().backward()

    def fail_after_backward() -> None:
        (p + 5.0 * q).sum().backward()
        raise RuntimeError

    with pytest.raises(RuntimeError), optimizer.sampled_params(train=True):
        fail_after_backward()
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((2,), 1 - 0.1 * 3.0))
    assert torch.equal(q.detach(), torch.ones(2))


def test_a_failure_after_the_samples_were_rewound_leaves_the_count_at_zero() -> None:
    model = make_model()
    optimizer = make(model)

    def rewind_and_fail() -> None:
        optimizer.rewind_samples()  # as a private optimizer does when a batch is drawn inside the block
        raise RuntimeError

    with pytest.raises(RuntimeError), optimizer.sampled_params(train=True):
        rewind_and_fail()
    assert optimizer.samples_used == 0


def test_predicting_between_backward_and_step_does_not_change_the_step() -> None:
    class TwoStreams(IVON):
        """Training noise from a fixed list, so that prediction samples do not shift it."""

        def _standard_normal(self, like: Tensor) -> Tensor:
            if training[0]:
                return torch.randn(like.shape, generator=fixed)
            return torch.randn(like.shape, generator=other)

    outcomes = []
    for predicts in (False, True):
        training, fixed, other = [True], torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)
        model = make_model()
        optimizer = TwoStreams(model.parameters(), lr=0.1, ess=50.0, beta2=0.99, mc_samples=2)
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(2):
                training[0] = True
                with optimizer.sampled_params(train=True):
                    loss_of(model).backward()
                training[0] = False
                if predicts:
                    with optimizer.sampled_params(), torch.no_grad():
                        model(X)
            optimizer.step()
        outcomes.append((weights(model), optimizer))
    (plain, plain_optimizer), (interrupted, interrupted_optimizer) = outcomes
    assert equal(plain, interrupted)
    assert same_state(plain_optimizer, interrupted_optimizer)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "act",
    [
        lambda o: o.state_dict(),
        lambda o: o.step(),
        lambda o: o.posterior(),
        lambda o: copy.deepcopy(o),
        lambda o: pickle.dumps(o),
    ],
    ids=["state_dict", "step", "posterior", "deepcopy", "pickle"],
)
def test_reading_the_mean_inside_the_context_is_an_error(act: Callable[[IVON], Any], training: bool) -> None:
    model = make_model()
    optimizer = make(model)
    with optimizer.sampled_params(train=training), pytest.raises(DpivonError, match="inside sampled_params"):
        act(optimizer)


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_nested_contexts_are_an_error_and_do_no_harm(outer: bool, inner: bool) -> None:
    model = make_model()
    optimizer = make(model)
    before = weights(model)
    with optimizer.sampled_params(train=outer):
        theta = weights(model)
        with pytest.raises(DpivonError, match="already inside"), optimizer.sampled_params(train=inner):
            pass
        assert equal(weights(model), theta)
    assert equal(weights(model), before)


def test_backward_after_leaving_the_context_raises() -> None:
    model = make_model()
    optimizer = make(model)
    with optimizer.sampled_params(train=True):
        loss = loss_of(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
