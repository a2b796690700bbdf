"""What IVON has learned survives being saved, loaded, copied and pickled, to the bit."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from ivon_runs import equal, loss_of, make, make_model, same_state, train, weights
from torch import nn

from dpivon import IVON


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(dtype: torch.dtype, samples: int) -> None:
    model = make_model(dtype)
    optimizer = make(model, mc_samples=samples)
    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), optimizer.generator.get_state()], file)
    file.seek(0)
    train(model, optimizer, 4)

    resumed_model = make_model(dtype)
    resumed = make(resumed_model, seed=99, mc_samples=samples)
    saved_weights, saved_state, saved_generator = torch.load(file, weights_only=True)
    resumed_model.load_state_dict(saved_weights)
    resumed.load_state_dict(saved_state)
    resumed.generator.set_state(saved_generator)
    train(resumed_model, resumed, 4)
    assert equal(weights(model), weights(resumed_model))
    assert same_state(optimizer, resumed)
    assert all(s["step"] == 7 for s in resumed.state.values())


def test_a_resumed_run_does_not_restart_the_debiasing() -> None:
    """With a constant gradient the debiased momentum is that gradient, so that every step has the same size."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    options: dict[str, Any] = {"lr": 0.1, "ess": 1.0, "weight_decay": 0.0, "curvature": "gradsq", "beta2": 1.0}
    optimizer = IVON([p], **options)

    def step(optimizer: IVON) -> float:
        before = p.item()
        p.grad = torch.ones_like(p)
        optimizer.step()
        return p.item() - before

    first = [step(optimizer) for _ in range(3)]
    resumed = IVON([p], **options)
    resumed.load_state_dict(optimizer.state_dict())
    assert [*first, step(resumed), step(resumed)] == pytest.approx([-0.1] * 5, rel=1e-12)


def test_loading_keeps_full_precision_state_for_bf16_parameters() -> None:
    model = make_model(torch.bfloat16)
    optimizer = make(model)
    train(model, optimizer, 3)
    other_model = make_model(torch.bfloat16)
    other_model.load_state_dict(model.state_dict())
    other = make(other_model)
    other.load_state_dict(optimizer.state_dict())
    assert same_state(optimizer, other)
    for p, state in other.state.items():
        assert p.dtype == torch.bfloat16
        assert {state[k].dtype for k in ("momentum", "hess", "mean")} == {torch.float32}
        assert torch.equal(state["mean"].bfloat16(), p.detach())
        assert not torch.equal(state["mean"].bfloat16().float(), state["mean"])  # it really holds more than p does
    mean = other.posterior().mean
    assert all(torch.equal(mean[str(i)], s["mean"]) for i, s in enumerate(other.state.values()))


def test_loaded_state_is_a_copy() -> None:
    model = make_model()
    optimizer = make(model)
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    other_model = make_model()
    other = make(other_model)
    other.load_state_dict(saved)
    train(other_model, other, 2)
    assert all(torch.equal(saved["state"][i]["hess"], kept["state"][i]["hess"]) for i in kept["state"])


def test_a_deepcopy_continues_identically_and_independently() -> None:
    model = make_model()
    optimizer = make(model)
    train(model, optimizer, 3)
    twin_model, twin = copy.deepcopy((model, optimizer))
    at_copy = weights(model)
    train(twin_model, twin, 3)
    assert equal(weights(model), at_copy)
    train(model, optimizer, 3)
    assert equal(weights(model), weights(twin_model))
    assert same_state(optimizer, twin)


def test_a_pickled_optimizer_continues_identically() -> None:
    model = make_model()
    optimizer = make(model, curvature="gradsq", mc_samples=2)
    train(model, optimizer, 3)
    twin_model, twin = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer, 3)
    train(twin_model, twin, 3)
    assert (twin.mc_samples, twin.curvature.name) == (2, "gradsq")
    assert equal(weights(model), weights(twin_model))


def test_a_copy_holds_no_pending_gradients() -> None:
    model = make_model()
    optimizer = make(model, mc_samples=2)
    with optimizer.sampled_params(train=True):
        loss_of(model).backward()
    assert copy.deepcopy(optimizer).samples_used == 0
    assert optimizer.samples_used == 1
    assert all(set(s) == {"step", "momentum", "hess"} for s in optimizer.state_dict()["state"].values())
