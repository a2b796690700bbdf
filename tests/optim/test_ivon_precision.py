"""IVON computes in full precision whatever its parameters are stored in, and follows them when they are cast."""

from __future__ import annotations

import pytest
import torch
from ivon_runs import equal, loss_of, make, make_model, train, weights
from torch import nn

from dpivon import IVON


def test_updates_too_small_for_bf16_accumulate_in_the_master_mean() -> None:
    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = IVON([p], lr=1e-4, ess=1.0, beta1=0.0, weight_decay=0.0, curvature="gradsq", beta2=1.0)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert torch.equal(p.detach() - 1e-4, p.detach())  # one update alone is rounded away
    torch.testing.assert_close(optimizer.posterior().mean["0"], torch.full((8,), 0.99), rtol=1e-5, atol=0)
    assert torch.equal(p.detach(), torch.full((8,), 0.99).bfloat16())


def test_weights_written_into_a_bf16_parameter_become_the_mean() -> None:
    p = nn.Parameter(torch.full((6,), 0.3).bfloat16())
    optimizer = IVON([p], lr=0.1, ess=1e12, curvature="gradsq", beta1=0.0, beta2=1.0, weight_decay=0.0)
    p.grad = torch.full_like(p, 1e-4)
    optimizer.step()
    master = optimizer.posterior().mean["0"].clone()
    with torch.no_grad():
        p[:3] = 2.0
    written = optimizer.posterior().mean["0"]
    assert torch.equal(written[:3], torch.full((3,), 2.0))
    assert torch.equal(written[3:], master[3:])
    with optimizer.sampled_params(train=True):  # σ = 1e-6: the sample shows where the mean is
        assert torch.equal(p.detach()[:3], torch.full((3,), 2.0).bfloat16())
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(optimizer.posterior().mean["0"][:3], torch.full((3,), 1.9))


@pytest.mark.parametrize("cast", ["double", "float", "bfloat16", "half"])
@pytest.mark.parametrize("start", [torch.float32, torch.bfloat16])
def test_state_follows_a_model_that_is_cast_after_training_began(start: torch.dtype, cast: str) -> None:
    """State is in the parameter's precision, and in fp32 with an fp32 master below that; the cast weights are the mean."""
    model = make_model(start)
    optimizer = make(model)
    train(model, optimizer, 2)
    momentum = optimizer.state[model[0].weight]["momentum"].clone()
    getattr(model, cast)()
    low = cast in ("bfloat16", "half")
    dtype = model[0].weight.dtype
    mean = optimizer.posterior().mean
    expected = torch.float32 if low else dtype
    for p, m in zip(model.parameters(), mean.values(), strict=True):
        assert m.dtype == expected
        assert torch.equal(m.to(dtype), p.detach())
    state = optimizer.state[model[0].weight]
    assert {v.dtype for k, v in state.items() if k != "step"} == {expected}
    assert ("mean" in state) == low
    assert torch.equal(state["momentum"], momentum.to(expected))
    train(model, optimizer, 1)
    assert state["step"] == 3
    assert all(v.dtype == expected for v in optimizer.posterior().variance.values())


def test_casting_before_the_first_step_is_the_same_as_casting_before_the_optimizer() -> None:
    early, late = make_model(torch.float64), make_model()
    optimizer = make(late)
    late.double()
    with torch.no_grad():
        for p, q in zip(late.parameters(), early.parameters(), strict=True):
            p.copy_(q)
    other = make(early)
    train(late, optimizer, 3)
    train(early, other, 3)
    assert equal(weights(early), weights(late))


def test_training_under_bf16_autocast_follows_full_precision() -> None:
    full, mixed = make_model(), make_model()
    ours, theirs = make(full), make(mixed)
    for _ in range(5):
        for model, optimizer, amp in ((full, ours, False), (mixed, theirs, True)):
            optimizer.zero_grad()
            with optimizer.sampled_params(train=True):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
                    loss = loss_of(model)
                loss.backward()
            optimizer.step()
    a, b = torch.cat([w.flatten() for w in weights(full)]), torch.cat([w.flatten() for w in weights(mixed)])
    assert mixed[0].weight.dtype == torch.float32
    assert not torch.equal(a, b)
    assert (a - b).norm() < 0.01 * a.norm()  # bf16 has a relative precision of 2⁻⁸


def test_a_full_precision_checkpoint_gives_a_bf16_model_its_master_mean() -> None:
    model = make_model()
    optimizer = make(model)
    train(model, optimizer, 2)
    low_model = make_model(torch.bfloat16)
    low_model.load_state_dict(model.state_dict())
    low = make(low_model)
    low.load_state_dict(optimizer.state_dict())
    for p, m in zip(low_model.parameters(), low.posterior().mean.values(), strict=True):
        assert m.dtype == torch.float32
        assert torch.equal(m, p.detach().float())
        assert torch.equal(low.state[p]["mean"], m)
