"""Which parameters IVON moves, and by whose hyperparameters: frozen and unused ones, groups, a scheduler."""

from __future__ import annotations

import pytest
import torch
from ivon_runs import equal, loss_of, make, make_model, train, weights
from torch import nn

from dpivon import IVON, ArgumentError


def test_frozen_parameters_stay_and_are_not_in_the_posterior() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = make(model)
    before = weights(model)
    with optimizer.sampled_params():
        assert torch.equal(model[0].weight, before[0])
        assert not torch.equal(model[2].weight, before[2])
    train(model, optimizer, 2)
    after = weights(model)
    assert equal(after[:2], before[:2])
    assert not torch.equal(after[2], before[2])
    assert set(optimizer.posterior(model).mean) == {"2.weight", "2.bias"}


@pytest.mark.parametrize("samples", [1, 3])
def test_a_parameter_frozen_with_its_gradient_in_place_stays(samples: int) -> None:
    model = make_model()
    optimizer = make(model, mc_samples=samples)
    train(model, optimizer, 1)
    loss_of(model).backward()
    model[0].requires_grad_(False)
    before = weights(model)
    for _ in range(samples):
        with optimizer.sampled_params(train=True):
            loss_of(model).backward()
    optimizer.step()
    assert equal(weights(model)[:2], before[:2])
    assert not torch.equal(weights(model)[2], before[2])


@pytest.mark.parametrize("samples", [1, 3])
def test_unused_parameters_are_left_alone_and_debiased_by_their_own_count(samples: int) -> None:
    model = make_model()
    spare = nn.Parameter(torch.ones(2))
    model.register_parameter("spare", spare)
    optimizer = make(model, mc_samples=samples)
    train(model, optimizer, 3)
    assert torch.equal(spare.detach(), torch.ones(2))
    assert optimizer.state[spare]["step"] == 0
    assert optimizer.state[model[0].weight]["step"] == 3


def test_a_parameter_used_at_some_samples_only_has_gradient_zero_at_the_others() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = IVON([p, q], lr=0.1, ess=1.0, mc_samples=2, curvature="gradsq", beta1=0.0, beta2=1.0, weight_decay=0.0)
    with optimizer.sampled_params(train=True):
        (3.0 * p + 4.0 * q).sum().backward()
    with optimizer.sampled_params(train=True):
        p.sum().backward()
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((2,), 1 - 0.1 * 2.0))
    torch.testing.assert_close(q.detach(), torch.full((2,), 1 - 0.1 * 2.0))


def test_parameter_groups_use_their_own_hyperparameters() -> None:
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = IVON(
        [{"params": [p], "lr": 0.5, "hess_init": 4.0, "ess": 10.0}, {"params": [q]}],
        lr=0.1,
        ess=100.0,
        hess_init=2.0,
        beta2=1.0,
        weight_decay=0.0,
        curvature="gradsq",
        rescale_lr=False,
    )
    variance = optimizer.posterior().variance
    torch.testing.assert_close(variance["0"], torch.full((3,), 1 / 40))
    torch.testing.assert_close(variance["1"], torch.full((3,), 1 / 200))
    p.grad, q.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 1 - 0.5 / 4))
    torch.testing.assert_close(q.detach(), torch.full((3,), 1 - 0.1 / 2))


def test_a_group_added_later_is_checked_and_trained() -> None:
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = IVON([p], lr=0.1, ess=10, curvature="gradsq")
    with pytest.raises(ArgumentError, match=r"ess=-1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "ess": -1})
    optimizer = IVON([p], lr=0.1, ess=10, curvature="gradsq")
    optimizer.add_param_group({"params": [q], "lr": 0.0})
    with optimizer.sampled_params(train=True):
        (p * q).sum().backward()
    optimizer.step()
    assert not torch.equal(p.detach(), torch.ones(3))
    assert torch.equal(q.detach(), torch.ones(3))


def test_a_learning_rate_scheduler_scales_the_steps() -> None:
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = IVON([p], lr=0.8, ess=1.0, beta1=0.0, beta2=1.0, weight_decay=0.0, curvature="gradsq")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    moves = []
    for _ in range(6):
        before = p.item()
        p.grad = torch.ones_like(p)
        optimizer.step()
        scheduler.step()
        moves.append(before - p.item())
    assert moves == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.2, 0.2], rel=1e-12)
