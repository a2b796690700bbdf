"""One number for confidence: p_T(y | x) ∝ p̄(y | x)^(1/T), T > 1 being less sure and T < 1 surer.

Guo et al., *On Calibration of Modern Neural Networks*, 2017. Scaling log p̄ serves points and averages over a posterior
alike: for one pass log p̄ is the logits up to a constant. The order of classes never changes, so accuracy does not either.

With ℓ(T) the mean NLL and surprise and entropy those of p_T,

    dℓ / d log(1/T) = mean_i [ −log p_T(y_i | x_i) − H(p_T(· | x_i)) ],

which rises in 1/T: **the temperature is right where the mean surprise equals the mean entropy.** How it is found in private
data is :mod:`dpivon.privacy.temperature`; what is here sees probabilities alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dpivon.errors import bad, check_number
from dpivon.predict import ClassPrediction


class Predictor(Protocol):
    """Anything that predicts classes: a ``Fitted``, a ``Learner``, an ``Ensemble``."""

    @property
    def predict(self) -> Callable[..., ClassPrediction]:
        """``predict(x, **options)``."""
        ...


def log_probabilities(probs: Tensor) -> Tensor:
    """log p̄ in double, a probability of zero counting as the smallest normal float."""
    if probs.ndim != 2 or probs.shape[1] < 2:
        raise bad(
            "probs.shape", tuple(probs.shape), "is not [examples, classes]", "Give one row of probabilities an example"
        )
    return probs.double().clamp_min(torch.finfo(torch.float32).tiny).log()


def temper(probs: Tensor, temperature: float) -> Tensor:
    """p_T, in the type of ``probs``."""
    t = check_number("temperature", temperature, "Use 1 to leave probabilities as they are", above=0.0)
    return (log_probabilities(probs) / t).softmax(-1).to(probs.dtype)


def surprise_less_entropy(log_probs: Tensor, labels: Tensor, temperature: float | Tensor) -> Tensor:
    """−log p_T(y_i) − H(p_T) of every example: the gradient of its NLL in log(1/T)."""
    log_p = (log_probs / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - entropy


@dataclass(frozen=True, eq=False)
class Tempered:
    """A predictor and its temperature.

    ``mutual_information`` stays that of the predictor: a temperature acts on the average and says nothing of its parts.
    """

    predictor: Predictor
    temperature: float

    def predict(self, x: Any, /, **options: Any) -> ClassPrediction:
        """As the predictor's own, with tempered ``probs`` and their ``entropy``."""
        raw = self.predictor.predict(x, **options)
        probs = temper(raw.probs, self.temperature)
        entropy = torch.special.entr(probs.double()).sum(-1).to(raw.entropy.dtype)
        return replace(raw, probs=probs, entropy=entropy)
