"""The posterior that IVON hands out is a snapshot, under the names its reader knows."""

from __future__ import annotations

import pytest
import torch
from ivon_runs import make, make_model, train

from dpivon import IVON, ArgumentError


def test_the_posterior_is_named_after_named_parameters_or_the_model_or_positions() -> None:
    model = make_model()
    names = [name for name, _ in model.named_parameters()]
    named = IVON(model.named_parameters(), lr=0.1, ess=10)
    bare = IVON(model.parameters(), lr=0.1, ess=10)
    assert list(named.posterior().mean) == names
    assert list(bare.posterior().mean) == ["0", "1", "2", "3"]
    assert list(bare.posterior(model).mean) == names
    model[0].weight.requires_grad_(False)
    assert list(bare.posterior().mean) == ["0", "1", "2"]
    assert bare.posterior().matches(model)
    with pytest.raises(ArgumentError, match="does not contain"):
        bare.posterior(make_model())


def test_the_posterior_is_a_snapshot() -> None:
    model = make_model()
    optimizer = make(model)
    train(model, optimizer, 1)
    posterior = optimizer.posterior()
    mean = {name: m.clone() for name, m in posterior.mean.items()}
    var = {name: v.clone() for name, v in posterior.variance.items()}
    train(model, optimizer, 2)
    assert all(torch.equal(posterior.mean[name], mean[name]) for name in mean)
    assert all(torch.equal(posterior.variance[name], var[name]) for name in var)
    assert not torch.equal(optimizer.posterior().mean["0"], mean["0"])


def test_names_of_a_model_wrapped_by_opacus_are_the_models_own() -> None:
    from opacus.grad_sample import GradSampleModule

    model = make_model()
    optimizer = make(model)
    assert list(optimizer.posterior(GradSampleModule(model)).mean) == [name for name, _ in model.named_parameters()]
