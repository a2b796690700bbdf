"""One call from data to a posterior: what it promises about budget, weights and equivalence with the stack."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpivon
from dpivon.audit.stack_session import TracedNetwork
from dpivon.models import SmallCNN
from dpivon.stacked import AnyNetwork, Run, Stack


@pytest.fixture(scope="module")
def digits():
    raw = load_digits()
    return torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(raw.target)


def test_digits_are_learnt_within_the_budget(digits):
    x, y = digits
    torch.manual_seed(0)
    blocks = []
    fitted = dpivon.fit(
        SmallCNN(), x[:1400], y[:1400], method="dp-ivon-gradsq", lr=0.5, batch_size=200, epochs=15, target_epsilon=8.0,
        delta=1e-4, seed=1,
        on_progress=lambda done, steps: blocks.append((done, steps)),
    )  # fmt: skip
    assert fitted.epsilon <= 8.0
    assert fitted.budget.steps == 15 * 7
    assert blocks[-1] == (105, 105)
    accuracy = float((fitted.predict(x[1400:], samples=8).label == y[1400:]).float().mean())
    assert accuracy > 0.7
    assert all(float(s.min()) > 0 for s in fitted.posterior.std.values())


def test_it_starts_from_the_models_weights_and_leaves_the_model_alone(digits):
    model = SmallCNN()
    before = copy.deepcopy(model.state_dict())
    fitted = dpivon.fit(
        model, *digits, lr=1e-12, batch_size=16, epochs=1, noise_multiplier=1.0, delta=1e-5, seed=3, method="dp-sgd"
    )
    for name, t in fitted.model.state_dict().items():
        torch.testing.assert_close(t, before[name])
        assert torch.equal(model.state_dict()[name], before[name])


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("label", [-1, 10, -100, 2**40])
@pytest.mark.parametrize("traced", [False, True])
def test_a_label_that_is_no_class_counts_for_nothing_and_raises_nothing(digits, label, traced):
    """After step 0 no exception depends on data: such a record is as one that is not finite, to the bit."""
    kind = TracedNetwork if traced else AnyNetwork
    ends = []
    for bad in ("label", "input"):
        x, y = digits[0][:60].clone(), digits[1][:60].clone()
        if bad == "label":
            y[3] = label
        else:
            x[3] = float("nan")
        network = kind(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        stack = Stack([Run("dp-sgd", 5, 1.0, 1.0, 0.1, 30)], network, x, y)
        for _ in stack.train(6):
            pass
        ends.append(stack.mean)
    assert torch.equal(*ends)
    assert bool(torch.isfinite(ends[0]).all())


def test_frozen_parameters_get_neither_noise_nor_steps(digits):
    model = SmallCNN()
    model.features.requires_grad_(False)
    plan = {"batch_size": 64, "epochs": 1, "noise_multiplier": 1.0, "delta": 1e-5, "seed": 3}
    fitted = dpivon.fit(model, *digits, method="dp-ivon-gradsq", lr=0.1, **plan)
    for name, p in fitted.model.named_parameters():
        frozen = name.startswith("features")
        assert torch.equal(p, model.get_parameter(name)) is frozen
        assert (name in fitted.posterior.mean) is not frozen


def test_a_loss_of_ones_own(digits):
    """Squared error of a linear model: its clipped sums are what autograd says example by example."""
    x, y = digits[0][:30].flatten(1), digits[1][:30].float()

    def squared(outputs, labels):
        return (outputs.squeeze(1) - labels).square()

    model = nn.Sequential(nn.Linear(64, 1))
    network = AnyNetwork(lambda: copy.deepcopy(model), squared)
    start = network.pack(model).unsqueeze(0)
    stack = Stack(
        [Run("dp-sgd", 5, 1e-9, 2.0, 1.0, 30, {"momentum": 0.0, "weight_decay": 0.0})], network, x, y, start=start
    )
    for _ in stack.train(1):
        pass
    total = torch.zeros(65)
    for a, b in zip(x, y, strict=True):  # q = 1: everybody is in the batch
        grads = torch.autograd.grad(squared(model(a.unsqueeze(0)), b.unsqueeze(0)).sum(), list(model.parameters()))
        g = torch.cat([t.flatten() for t in grads])
        total += g * min(1.0, 2.0 / float(g.norm()))
    torch.testing.assert_close(start[0] - stack.mean[0], total / 30, rtol=1e-4, atol=1e-6)


def test_a_wrong_plan_is_refused_by_name(digits):
    with pytest.raises(dpivon.ArgumentError, match="target_epsilon"):
        dpivon.fit(SmallCNN(), *digits, batch_size=64, epochs=1, delta=1e-5)
    with pytest.raises(dpivon.ArgumentError, match="method"):
        dpivon.fit(SmallCNN(), *digits, lr=0.1, batch_size=64, epochs=1, delta=1e-5, noise_multiplier=1.0, method="sgd")
    with pytest.raises(dpivon.ArgumentError, match=r"method='ivon': cannot be fitted\. Use one of 'dp-sgd', "):
        dpivon.fit(SmallCNN(), *digits, batch_size=64, epochs=1, delta=1e-5, noise_multiplier=1.0, method="ivon")


@pytest.mark.parametrize("method", [None, "dp-steady", "dp-sgd", "dp-ivon-gradsq"])
def test_a_rate_that_is_not_given_is_the_methods_own(digits: tuple[Tensor, Tensor], method: str | None) -> None:
    """And a method that is not given is dp-steady: the same weights to the bit, with a folder or without."""
    x, y = digits[0][:120].flatten(1), digits[1][:120]
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    plan: dict[str, Any] = {"batch_size": 40, "epochs": 2, "noise_multiplier": 1.0, "delta": 1e-3, "seed": 1}
    own = {None: 3.5, "dp-steady": 3.5, "dp-sgd": 0.1, "dp-ivon-gradsq": 1.0}[method]
    named = {} if method is None else {"method": method}
    for data in ((x, y), (TensorDataset(x, y),)):
        given = dpivon.fit(model, *data, method=method or "dp-steady", lr=own, **plan)
        left_out = dpivon.fit(model, *data, **named, **plan)
        assert all(torch.equal(mean, given.posterior.mean[name]) for name, mean in left_out.posterior.mean.items())
        assert all(torch.equal(std, given.posterior.std[name]) for name, std in left_out.posterior.std.items())


@pytest.mark.parametrize("method", ["dp-sgd", "dp-adam"])
def test_people_are_the_unit_where_their_ids_are_given(method: str) -> None:
    """A step on everyone with next to no noise: that of clipped means over people; with a row each it is the stack's."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 5, generator=generator), torch.randint(3, (40,), generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    ids = [i % 3 if i < 20 else i for i in range(40)]
    n = len(set(ids))
    plan: dict[str, Any] = {"method": method, "lr": 0.5, "epochs": 1, "options": {"weight_decay": 0.0}}
    plan |= {"delta": 1e-5, "noise_multiplier": 1e-5, "max_grad_norm": 0.1}

    def weights(**options: Any) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = dpivon.fit(model, x, y, **plan, **options)
        assert fitted.account.unit == ("person" if "user_ids" in options else None)
        return torch.cat([p.detach().flatten() for p in fitted.model.parameters()])

    alone = weights(batch_size=40, user_ids=range(40))
    assert float((alone - weights(batch_size=40)).abs().max()) < 1e-4
    if method == "dp-sgd":
        total = torch.zeros(18)
        for one in set(ids):
            rows = [i for i, owner in enumerate(ids) if owner == one]
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            g = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])
            total += g * min(1.0, 0.1 / float(g.norm()))
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert float((weights(batch_size=n, user_ids=ids) - (start - 0.5 * total / n)).abs().max()) < 1e-5
    assert bool(torch.isfinite(weights(batch_size=n, user_ids=ids, dtype=torch.bfloat16)).all())
    if method == "dp-sgd":
        flat = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        with pytest.raises(dpivon.ArgumentError, match="prior='Posterior': is not used by 'dp-sgd'"):
            weights(batch_size=n, user_ids=ids, prior=dpivon.Posterior(flat, flat))
