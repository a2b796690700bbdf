"""IVON calls its curvature estimator as that asks to be called, and finds it under upstream's name as well."""

from __future__ import annotations

from typing import Any

import torch
from ivon_runs import make, make_model, train
from torch import Tensor

from dpivon.optim.curvature import Evidence


class Recorder:
    """Curvature as the mean square of the whole tensor: a rule that is not elementwise."""

    name = "tensor-mean"
    elementwise = False
    needs_sample = False

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, evidence: Evidence[Any]) -> Tensor:
        assert isinstance(evidence.g, Tensor)
        self.seen.append(tuple(evidence.g.shape))
        return evidence.ess * evidence.g_squared.mean().expand_as(evidence.g)


def test_an_estimator_that_is_not_elementwise_is_called_tensor_by_tensor() -> None:
    model = make_model()
    recorder = Recorder()
    optimizer = make(model, curvature=recorder, beta2=0.5)
    train(model, optimizer, 1)
    assert recorder.seen == [tuple(p.shape) for p in model.parameters()]
    for p in model.parameters():
        h_hat = 50.0 * p.grad.square().mean()
        h = 0.5 + 0.5 * h_hat + 0.25 * (1 - h_hat) ** 2 / (2 * (1 + 1e-4))
        torch.testing.assert_close(optimizer.state[p]["hess"], h.expand_as(p), rtol=1e-5, atol=1e-6)
    assert optimizer.posterior().metadata["curvature"] == "tensor-mean"


def test_upstreams_name_of_the_estimator_is_accepted() -> None:
    assert make(make_model(), hess_approx="price").curvature.name == "reparam"
    assert make(make_model(), curvature="price").curvature.name == "reparam"
    assert make(make_model(), hess_approx="gradsq").curvature.name == "gradsq"
    assert make(make_model()).curvature.name == "reparam"
