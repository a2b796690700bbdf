"""Two generators with one seed draw the same numbers: noise would then repeat what decided the batches, or be known from θ.

Where both are given by the caller that is easily done: everything seeded with 0. In torch the noise of a coordinate is then a
function of the very number that said whether an example is in the batch, and small where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dpivon.errors import bad
from dpivon.privacy.noise import KNOWN_SEED


def check_noise_alone(noise: Any, others: Mapping[str, Any]) -> None:
    """An error if one of the others, by their names, draws what the noise's generator draws. One generator for two is fine."""
    for name, other in others.items():
        if _twins(noise, other):
            problem = f"has the seed of {name}, and would draw the same numbers"
            fix = "Seed them differently, or give a single PrivacyEngine(generator=…), which seeds noise and batches apart"
            raise bad("noise_generator", noise, problem, fix)


def _twins(a: Any, b: Any) -> bool:
    if (
        not (isinstance(a, torch.Generator) and isinstance(b, torch.Generator))
        or a is b
        or a.device.type != b.device.type
    ):
        return False
    # All that were started by the operating system name the same seed, and stand elsewhere.
    return (a.initial_seed() == b.initial_seed() != KNOWN_SEED) or torch.equal(a.get_state(), b.get_state())
