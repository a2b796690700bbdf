"""Scores after private temperatures: chosen on the training data, charged to every run, and applied to the test set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpivon.metrics import batch_scores
from dpivon.privacy.noise import SEEDED, TorchNoise
from dpivon.privacy.temperature import BOUND, HALVINGS, choose
from dpivon.study.asked import Another, Asked
from dpivon.study.datasets import StudyData
from dpivon.temperature import log_probabilities, temper
from dpivon.threads import one_thread


@dataclass(frozen=True, eq=False)
class Said:
    """What a run predicts, of the test set and of the training data, and the seed of its noise."""

    test: Tensor
    training: Tensor
    seed: int


@one_thread()
@torch.no_grad()
def tempered_scores(
    asked: Asked, data: StudyData, said: Mapping[str, Said], *, noise_multiplier: float
) -> dict[str, dict[str, float]]:
    """The temperature of every run, by its id, and its scores after it; NaN where the run has diverged."""
    training = [_usable(run.training) for run in said.values()]
    labels = data.labels.to(training[0].device)
    log_probs = [log_probabilities(probs) for probs in training]
    asked.cover()
    while True:
        noises = [_HostNoise(asked.seed(run.seed)) for run in said.values()]
        try:
            before = asked.questions(list(said))
            found = choose(log_probs, labels, noise_multiplier, BOUND, HALVINGS, noises, asked.covers, before)
            break
        except Another:
            asked.charge()
    return {run: _scores(temperature, said[run].test, data) for run, (temperature, _) in zip(said, found, strict=True)}


class _HostNoise:
    """Drawn on the host wherever the sum is: a study's seeds are public, and its noise is the same on every machine."""

    origin = SEEDED

    def __init__(self, seed: int) -> None:
        self._noise = TorchNoise(torch.Generator().manual_seed(seed))

    def normal(self, like: Tensor, std: float) -> Tensor:
        return self._noise.normal(like.cpu(), std).to(like.device)


def _scores(temperature: float, probs: Tensor, data: StudyData) -> dict[str, float]:
    tempered = temper(probs, temperature) if bool(torch.isfinite(probs).all()) else probs
    (after,) = batch_scores(tempered.unsqueeze(0), data.eval_labels)
    return {"temperature": temperature} | {f"tempered_{key}": value for key, value in after.items()}


def _usable(probs: Tensor) -> Tensor:
    """A run that has diverged says nothing; the others are still to get their temperature."""
    return probs if bool(torch.isfinite(probs).all()) else torch.full_like(probs, 1.0 / probs.shape[1])
