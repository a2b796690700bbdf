"""Temperatures for the runs of a stack, chosen privately and charged to each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpivon.errors import bad, check_number
from dpivon.privacy.noise import NoiseSource, SecureNoise, TorchNoise
from dpivon.privacy.temperature import BOUND, HALVINGS, choose
from dpivon.stacked.stack import Stack
from dpivon.temperature import log_probabilities


def calibrate_stack(
    stack: Stack,
    probs: Sequence[Tensor],
    labels: Tensor,
    *,
    noise_multiplier: float,
    bound: float = BOUND,
    halvings: int = HALVINGS,
    generators: Sequence[torch.Generator] | None = None,
) -> list[float]:
    """The temperature of every run, as :func:`dpivon.calibrate_temperature` chooses one.

    ``probs`` are what each run, in the caller's order, predicts for the same calibration examples, [n, classes]: by its
    mean or averaged over its posterior. Every account is charged before every answer, and a ledger before the accounts.
    ``generators``, one a run, are for public data only.
    """
    if len(probs) != len(stack.runs):
        raise bad("probs", len(probs), f"does not fit {len(stack.runs)} runs", "Give one tensor of predictions a run")
    check_number("noise_multiplier", noise_multiplier, "Use a value such as 20; 0 has no guarantee", at_least=0.0)
    noises: list[NoiseSource] = [SecureNoise() for _ in probs]
    if generators is not None:
        noises = [TorchNoise(generator) for generator in generators]
    found = choose(
        [log_probabilities(p) for p in probs],
        labels,
        noise_multiplier,
        bound,
        halvings,
        noises,
        stack.mechanism.charge_beside,
    )
    return [temperature for temperature, _ in found]
