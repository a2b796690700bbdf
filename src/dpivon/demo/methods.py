"""The optimizers that the demonstration compares, and what was chosen for each of them.

Equal effort: three learning rates each, √10 apart, everything else at the library's defaults. The choice is the
lowest negative log-likelihood on the *validation* split, averaged over the seeds 101, 102 and 103, at ε = 4, δ = 1e-4,
40 epochs, batch 256, C = 1 (``python -m dpivon.demo.tune``, one thread of an AMD EPYC, torch 2.13):

    DP-SGD          lr 0.03   NLL 0.294  accuracy .913     0.1   0.232  .927     0.3   1.647  .778
    DP-Adam         lr 0.003  NLL 0.392  accuracy .888     0.01  0.208  .945     0.03  0.746  .845
    DP-IVON-Gradsq  lr 0.3    NLL 0.531  accuracy .862     1     0.248  .928     3     0.592  .847

IVON's numbers are averages over 32 posterior samples, which is how it predicts; at the posterior mean its NLL is
0.479, 0.280 and 0.798. SGD's momentum sums gradients where IVON's averages them, so their rates differ by a factor 10.
ε, batch size and epochs are the same for all; they were settled in a first look at the validation split, with two
learning rates for each method at ε = 4 and 8, and one at two other lengths or batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Adam, Optimizer

from dpivon.optim import IVON

EPSILON, DELTA, EPOCHS = 4.0, 1e-4, 40  # what the learning rates were chosen at


@dataclass(frozen=True)
class Method:
    """``make`` gets the parameters, the learning rate, N and the generator of posterior samples."""

    name: str
    lr: float
    make: Callable[[Any, float, int, torch.Generator], Optimizer]


def _sgd(params: Any, lr: float, examples: int, generator: torch.Generator) -> Optimizer:
    return SGD(params, lr=lr, momentum=0.9)


def _adam(params: Any, lr: float, examples: int, generator: torch.Generator) -> Optimizer:
    return Adam(params, lr=lr)


def _ivon(params: Any, lr: float, examples: int, generator: torch.Generator) -> Optimizer:
    """h₀ = 1, β₁ = 0.9, β₂ = 0.99999 and rescale_lr are IVON's defaults; private training defaults to Gradsq."""
    return IVON(params, lr=lr, ess=examples, generator=generator)


CANDIDATES = {
    "DP-SGD": (0.03, 0.1, 0.3),
    "DP-Adam": (0.003, 0.01, 0.03),
    "DP-IVON-Gradsq": (0.3, 1.0, 3.0),
}
METHODS = (
    Method("DP-SGD", 0.1, _sgd),
    Method("DP-Adam", 0.01, _adam),
    Method("DP-IVON-Gradsq", 1.0, _ivon),
)
