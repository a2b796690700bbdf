"""Private prediction sets: coverage and size at a stated ε.

Half of the test images calibrate, as rows that training never saw; the other half is scored. Thresholds per class are those of
split conformal prediction, found by noisy sums (:mod:`dpivon.privacy.counting`; compare Angelopoulos et al., 2022, and P-COQS,
2507.12497). The calibration images are people of their own, so ε below is theirs and not added to that of training.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dpivon.privacy.accounting import noise_multiplier
from dpivon.privacy.counting import HALVINGS, NoisySums, class_thresholds
from dpivon.privacy.noise import TorchNoise

COVERAGE, DELTA = 0.9, 1e-5
#: ε of the thresholds; inf: without noise.
EPSILONS = (0.1, 0.3, 1.0, float("inf"))
ROW = (
    "method", "epsilon", "noise_multiplier", "lr", "seed", "predictor", "map", "charged", "set_epsilon", "calibrated",
    "coverage", "least_class", "size", "single", "device", "torch", "commit",
)  # fmt: skip


def rows(probs: Tensor, labels: Tensor, seed: int) -> Iterator[dict[str, Any]]:
    """Coverage over all images and in the class that has least, the mean size, and the share of sets of one class."""
    probs, labels = probs.double().cpu(), labels.cpu()
    places = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    fit, held = places[: len(places) // 2], places[len(places) // 2 :]
    for epsilon in EPSILONS:
        sigma = 0.0 if epsilon == float("inf") else noise_multiplier(epsilon, DELTA, 1.0, HALVINGS, "rdp")
        noise = TorchNoise(torch.Generator().manual_seed(1000 + seed))
        thresholds = class_thresholds(probs[fit], labels[fit], COVERAGE, NoisySums(sigma, noise, lambda spec: None))
        found = probs[held] >= 1 - torch.tensor(thresholds, dtype=torch.float64)
        hit, sizes = found.gather(1, labels[held].unsqueeze(1)).squeeze(1).double(), found.sum(1).double()
        least = min(float(hit[labels[held] == c].mean()) for c in labels[held].unique())
        scored = {"coverage": float(hit.mean()), "least_class": least, "size": float(sizes.mean())}
        yield (
            {"set_epsilon": epsilon, "calibrated": len(fit)} | scored | {"single": float((sizes == 1).double().mean())}
        )
