"""The gradients of one step: added up inside a sample, averaged over samples, and forgotten by zero_grad."""

from __future__ import annotations

import pytest
import torch
from ivon_runs import X, Y, equal, loss_of, make, make_model, train, weights
from torch import nn


def test_gradients_accumulate_inside_one_context() -> None:
    whole_model, parts_model = make_model(torch.float64), make_model(torch.float64)
    whole, parts = make(whole_model), make(parts_model)
    for _ in range(3):
        whole.zero_grad()
        with whole.sampled_params(train=True):
            loss_of(whole_model).backward()
        whole.step()
        parts.zero_grad()
        with parts.sampled_params(train=True):
            for x, y in zip(X.double().split(4), Y.split(4), strict=True):
                (nn.functional.cross_entropy(parts_model(x), y) / 4).backward()
        parts.step()
    for a, b in zip(weights(whole_model), weights(parts_model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("declared", [1, 3])
@pytest.mark.parametrize("estimator", ["reparam", "gradsq"])
def test_several_contexts_average(estimator: str, declared: int) -> None:
    """g, g² and g ⊙ ε are averages over the contexts entered, whether or not mc_samples announced them."""
    model = make_model(torch.float64)
    optimizer = make(model, curvature=estimator, mc_samples=declared, beta1=0.0, beta2=0.9, debias=False)
    mean = weights(model)
    gradients, perturbations = [], []
    for _ in range(3):
        with optimizer.sampled_params(train=True):
            loss_of(model).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
            perturbations.append([p.detach() - m for p, m in zip(model.parameters(), mean, strict=True)])
    optimizer.step()
    for i, p in enumerate(model.parameters()):
        gs = torch.stack([g[i] for g in gradients])
        epsilons = torch.stack([e[i] for e in perturbations])
        h_hat = 50.0 * (gs.square().mean(0) if estimator == "gradsq" else (gs * epsilons).mean(0) * (1 + 1e-4))
        h = 0.9 + 0.1 * h_hat + 0.01 * (1 - h_hat).square() / (2 * (1 + 1e-4))
        torch.testing.assert_close(optimizer.state[p]["momentum"], gs.mean(0), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(optimizer.state[p]["hess"], h, rtol=1e-9, atol=1e-10)


def test_zero_grad_after_a_complete_set_of_samples_starts_over() -> None:
    model, reference_model = make_model(), make_model()
    optimizer, reference = make(model), make(reference_model)
    with optimizer.sampled_params(train=True):
        (100.0 * loss_of(model)).backward()
    optimizer.zero_grad()
    optimizer.generator.manual_seed(3)
    train(model, optimizer, 1)
    train(reference_model, reference, 1)
    assert equal(weights(model), weights(reference_model))
