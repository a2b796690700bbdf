"""Scores and predictions of a study's runs on a GPU are those on the host. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: run `pytest tests/gpu` on a machine with one", allow_module_level=True)

from dpivon.metrics import batch_scores
from dpivon.models import CompactCNN
from dpivon.stacked import AnyNetwork, PaperNetwork
from dpivon.study.run.evaluation import predict_row

DEVICE = torch.device("cuda")


def test_scores_on_the_device_are_those_on_the_host():
    """Of 57 sets at once, one of them lost; and they are the same each time, to the bit."""
    generator = torch.Generator("cuda").manual_seed(5)
    probs = torch.randn(57, 2000, 10, device=DEVICE, generator=generator).softmax(-1)
    probs[3, 7] = torch.nan
    labels = torch.randint(0, 10, (57, 2000), device=DEVICE, generator=generator)
    found = batch_scores(probs, labels)
    assert str(found) == str(batch_scores(probs, labels))
    for ours, theirs in zip(found, batch_scores(probs.cpu(), labels.cpu()), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("build", [PaperNetwork, lambda: AnyNetwork(CompactCNN)])
def test_a_point_is_predicted_as_on_the_host(build):
    """To TF32's rounding, with more images than go through at once, bytes among them."""
    network, generator = build(), torch.Generator().manual_seed(3)
    mean = network.initial(0)
    sets = [
        torch.randn(700, 3, 32, 32, generator=generator).repeat(8, 1, 1, 1),
        torch.randint(0, 256, (300, 3, 32, 32), dtype=torch.uint8, generator=generator),
    ]
    none = torch.zeros_like(mean)
    there = predict_row(network, mean.to(DEVICE), none.to(DEVICE), [x.to(DEVICE) for x in sets], samples=2, seed=0)
    here = predict_row(network, mean, none, [sets[0][:700], sets[1]], samples=2, seed=0)
    for a, b in zip(there["mean"], here["mean"], strict=True):
        assert float((a.probs[: len(b.probs)].cpu() - b.probs).abs().sum(-1).mean()) / 2 < 1e-3
