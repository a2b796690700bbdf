"""Scores after a private temperature: chosen on the training data, charged to every run, and applied to the test set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpivon.stacked import Stack
from dpivon.stacked.temperature import calibrate_stack
from dpivon.study.datasets import StudyData
from dpivon.study.evaluate import label_scores
from dpivon.temperature import temper


@torch.no_grad()
def tempered_scores(
    stack: Stack, data: StudyData, said: Sequence[Sequence[Tensor]], *, noise_multiplier: float
) -> list[dict[str, float]]:
    """The temperature of every run, and its scores after it; NaN where the run has diverged. ``said`` is what each run
    predicts, of the test set and of the training data."""
    device = torch.device("cpu")  # of the noise: a study's seeds are public, and the same on every machine
    training = [_usable(probs).to(device) for _, probs in said]
    generators = [torch.Generator(device).manual_seed(stack.runs[stack._row(i)].seed) for i in range(len(said))]
    temperatures = calibrate_stack(
        stack, training, data.labels.to(device), noise_multiplier=noise_multiplier, generators=generators
    )
    out = []
    for temperature, (probs, _) in zip(temperatures, said, strict=True):
        tempered = temper(probs, temperature) if bool(torch.isfinite(probs).all()) else probs
        after = label_scores(tempered, data.eval_labels)
        out.append({"temperature": temperature} | {f"tempered_{key}": value for key, value in after.items()})
    return out


def _usable(probs: Tensor) -> Tensor:
    """A run that has diverged says nothing; the others are still to get their temperature."""
    return probs if bool(torch.isfinite(probs).all()) else torch.full_like(probs, 1.0 / probs.shape[1])
