"""Arguments and outputs that predict refuses, in sentences that name them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dpivon.errors import ArgumentError
from dpivon.posterior import Posterior
from dpivon.predict import predict
from test_predict import Fixed, X, classifier


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": -1}, "samples=-1"),
        ({"samples": 1.5}, "samples=1.5"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"likelihood": "poisson"}, "likelihood='poisson'"),
        ({"noise_variance": 1.0}, "noise_variance=1.0.*no meaning"),
        ({"likelihood": "gaussian", "noise_variance": 0.0}, "noise_variance=0.0"),
        ({"likelihood": "gaussian"}, "noise_variance=None.*returns Tensor"),
        ({"likelihood": "bernoulli"}, r"\(50, 4\).*one logit"),
        ({"x": torch.zeros(0, 3)}, r"x\.shape=\(0, 3\).*no examples"),
        ({"x": torch.tensor(1.0)}, r"x\.shape=\(\).*no examples"),
        ({"x": []}, "no batches"),
        ({"x": "text"}, "x='str'"),
        ({"x": 3}, "x='int'"),
        ({"x": ["text"]}, "x='str'.*not a batch"),
        ({"x": [{"a": 1}]}, "x='dict'.*not a batch"),
    ],
)
def test_arguments_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    model = classifier()
    with pytest.raises(ArgumentError, match=message):
        predict(model, Posterior.point(model), **({"x": X} | options))


@pytest.mark.parametrize(
    ("output", "options", "message"),
    [
        (torch.zeros(50, 1), {}, r"\(50, 1\).*at least two"),
        (torch.zeros(50), {}, r"\(50,\)"),
        (torch.zeros(49, 2), {}, r"\(49, 2\)"),
        (torch.zeros(50, 2).long(), {}, "floating-point"),
        ((torch.zeros(50, 2),), {}, "'tuple'.*floating-point"),
        (torch.zeros(49), {"likelihood": "gaussian", "noise_variance": 1.0}, r"\(49,\).*batch first"),
        ((torch.zeros(50),) * 2, {"likelihood": "gaussian", "noise_variance": 1.0}, "returns tuple"),
        ((torch.zeros(50), torch.ones(50, 1)), {"likelihood": "gaussian"}, r"\(50, 1\).*differs"),
        ((torch.zeros(50), -torch.ones(50)), {"likelihood": "gaussian"}, "-1.0.*at least 0"),
        ((torch.zeros(50), torch.full((50,), math.inf)), {"likelihood": "gaussian"}, "50 of 50.*infinite"),
    ],
)
def test_outputs_that_do_not_fit_the_likelihood(output: Any, options: dict[str, Any], message: str) -> None:
    model = Fixed(output)
    with pytest.raises(ArgumentError, match=message):
        predict(model, Posterior.point(model), X, **options)
