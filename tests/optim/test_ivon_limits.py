"""Settings at their limits: momentum or curvature that never moves, and IVON that is SGD."""

from __future__ import annotations

import pytest
import torch
from ivon_runs import equal, loss_of, make, make_model, train, weights

from dpivon import IVON


def test_beta1_of_one_never_moves_the_momentum() -> None:
    model = make_model()
    optimizer = make(model, beta1=1.0, weight_decay=0.0)
    before = weights(model)
    train(model, optimizer, 3)
    assert equal(weights(model), before)
    assert all(not s["momentum"].any() for s in optimizer.state.values())
    assert any((s["hess"] != 1).any() for s in optimizer.state.values())


def test_beta2_of_one_never_moves_the_curvature() -> None:
    model = make_model()
    optimizer = make(model, beta2=1.0)
    before = weights(model)
    train(model, optimizer, 3)
    assert all(torch.equal(s["hess"], torch.ones_like(s["hess"])) for s in optimizer.state.values())
    assert not equal(weights(model), before)


@pytest.mark.parametrize("lr", [0.25, 0.1])
@pytest.mark.parametrize("estimator", ["gradsq", "reparam"])
def test_degenerate_settings_are_exactly_sgd(estimator: str, lr: float) -> None:
    """Bit for bit where lr·g is exact; SGD's fused multiply-add rounds once where we round twice."""
    sgd_model, model = make_model(), make_model()
    sgd = torch.optim.SGD(sgd_model.parameters(), lr=lr)
    optimizer = IVON(
        model.parameters(),
        lr=lr,
        ess=1e30,
        beta1=0.0,
        beta2=1.0,
        weight_decay=0.0,
        rescale_lr=False,
        curvature=estimator,
    )
    for _ in range(30):
        sgd.zero_grad()
        loss_of(sgd_model).backward()
        sgd.step()
        optimizer.zero_grad()
        with optimizer.sampled_params(train=True):  # σ = 1e-15 is below the resolution of every weight here
            loss_of(model).backward()
        optimizer.step()
    if lr == 0.25:
        assert equal(weights(model), weights(sgd_model))
    for ours, theirs in zip(weights(model), weights(sgd_model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
