"""Where privacy noise comes from."""

from __future__ import annotations

import math
import os
import secrets
from typing import Protocol

import torch
from torch import Tensor


class NoiseSource(Protocol):
    def normal(self, like: Tensor, std: float) -> Tensor:
        """Independent N(0, std²) in the shape, dtype and on the device of ``like``."""
        ...


class TorchNoise:
    """PyTorch's pseudo-random generator: fast, reproducible from its seed, and only as secret as that seed.

    Without a generator it makes its own, seeded once from the global one: a ``torch.manual_seed`` inside the training
    loop would otherwise add the same noise again, and two such releases subtract to the data.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator if generator is not None else own_generator()
        self._elsewhere: dict[torch.device, torch.Generator] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> TorchNoise:
        return self  # a copied generator would add the same noise twice, and two such releases subtract to the data

    def normal(self, like: Tensor, std: float) -> Tensor:
        if std == 0.0:
            return torch.zeros_like(like)
        generator = self._on(like.device)
        return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator).mul_(std)

    def refresh(self) -> None:
        """From here on noise that nobody has seen, whatever seed was set: after a crash, part of the old stream was used."""
        self.reseed(secrets.randbits(63))

    def reseed(self, seed: int) -> None:
        """From here on noise of this seed, from a generator that nobody else holds."""
        self.generator = torch.Generator(self.generator.device).manual_seed(seed)
        self._elsewhere.clear()

    def _on(self, device: torch.device) -> torch.Generator:
        """The generator for a device: a child of ours if ours lives elsewhere."""
        if self.generator.device == device:
            return self.generator
        if device not in self._elsewhere:
            self._elsewhere[device] = own_generator(self.generator, device)
        return self._elsewhere[device]


class SecureNoise:
    """The operating system's cryptographic generator, by Box–Muller in double precision.

    Four independent draws are summed and halved: the sum has the stated variance, and its low bits no longer reveal a
    single draw (Holohan and Braghin, *Secure Random Sampling in Differential Privacy*, 2021, section 5.1).
    """

    generator: torch.Generator | None = None  # none whose state could be saved, on purpose

    def normal(self, like: Tensor, std: float) -> Tensor:
        if std == 0.0:
            return torch.zeros_like(like)
        total = sum((self._standard_normal(like.numel()) for _ in range(4)), start=torch.zeros(1, dtype=torch.float64))
        return (total * (std / 2)).to(like.dtype).reshape(like.shape).to(like.device)

    @staticmethod
    def _standard_normal(n: int) -> Tensor:
        half = (n + 1) // 2
        radius = torch.sqrt(-2.0 * torch.log1p(-secure_uniform(half)))
        angle = 2.0 * math.pi * secure_uniform(half)
        return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:n]


def own_generator(parent: torch.Generator | None = None, device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator, seeded by one draw from its parent (the global generator if None)."""
    source = None if parent is None or parent.device.type != "cpu" else parent
    seed = int(torch.randint(2**63 - 1, (1,), generator=source))
    return torch.Generator(device).manual_seed(seed)


def secure_uniform(n: int) -> Tensor:
    """n doubles in [0, 1) with 53 random bits each, from the operating system."""
    bits = torch.frombuffer(bytearray(os.urandom(8 * n) or b"\0" * 8), dtype=torch.int64)[:n]
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
