"""What IVON refuses, or warns of, in words that name it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ivon_runs import equal, loss_of, make, make_model, weights
from torch import nn

from dpivon import ArgumentError, DpivonError


@pytest.mark.parametrize("samples", [1, 2])
def test_sparse_gradients_are_refused(samples: int) -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = make(embedding, mc_samples=samples)
    before = weights(embedding)

    def closure() -> None:
        embedding(torch.tensor([1, 2])).sum().backward()

    with pytest.raises(DpivonError, match="sparse"):
        optimizer.step(closure)
    assert equal(weights(embedding), before)


def test_a_step_without_a_gradient_is_refused() -> None:
    model = make_model()
    optimizer = make(model)
    with pytest.raises(DpivonError, match=r"step\(\) without a gradient"):
        optimizer.step()


def test_a_step_without_a_sample_warns_once_and_leaves_the_curvature() -> None:
    model = make_model()
    optimizer = make(model)
    loss_of(model).backward()
    with pytest.warns(UserWarning, match="needs a θ-sample"):
        optimizer.step()
    loss_of(model).backward()
    optimizer.step()  # a second warning would be an error
    assert all(torch.equal(s["hess"], torch.ones_like(s["hess"])) for s in optimizer.state.values())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -0.1),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("ess", 0.0),
        ("ess", -5),
        ("hess_init", 0.0),
        ("hess_init", -1.0),
        ("beta1", -0.1),
        ("beta1", 1.1),
        ("beta2", -0.1),
        ("beta2", 1.1),
        ("weight_decay", -1e-4),
        ("mc_samples", 0),
        ("mc_samples", 1.5),
        ("clip_radius", 0.0),
        ("clip_radius", -1.0),
        ("clip_radius", float("nan")),
        ("curvature", "fisher"),
        ("curvature", 3),
        ("lr", "fast"),
    ],
)
def test_a_bad_hyperparameter_is_named_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        make(make_model(), **{name: value})
    assert f"{name}={value!r}" in str(caught.value)


def test_both_names_of_the_estimator_at_once_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"hess_approx='price'.*curvature='gradsq'"):
        make(make_model(), curvature="gradsq", hess_approx="price")
