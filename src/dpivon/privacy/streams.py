"""Randomness of many runs that each own a seed: what a run draws depends on its seed, step and stream, not on its company.

On a GPU the draws come from :mod:`dpivon.privacy.kernels.random`; here is the same generator in numpy, which CPU runs
use and the tests hold the kernels to. Philox-4x32-10 (Salmon et al., *Parallel Random Numbers: As Easy as 1, 2, 3*, 2011).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpivon.privacy.noise import OfOneProcess, this_process

#: Streams of one run; two draws with different stream, step or element never share a counter.
POSTERIOR, PRIVACY, SAMPLING, VIEWS, SEATS = 0, 1, 2, 3, 4
STREAMS = 8  # further draws of a stream are so many apart

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(seed: int, element: np.ndarray, step: int, stream: int) -> tuple[np.ndarray, ...]:
    """Four words of 32 random bits for every element."""
    x = [element.astype(np.uint64) & _WORD] + [np.full(element.shape, v, np.uint64) for v in (step & _WORD, stream, 0)]
    return tuple(_rounds(x, seed & _WORD, (seed >> 32) & _WORD))


def _rounds(x: list[Any], k0: Any, k1: Any) -> list[Any]:
    """The ten rounds, on words kept in 64 bits: numpy's without a sign, torch's with one; products have the same bits."""
    for _ in range(10):
        p0, p1 = x[0] * _MULTIPLIERS[0], x[2] * _MULTIPLIERS[1]
        high0, high1 = (p0 >> 32) & _WORD, (p1 >> 32) & _WORD
        x = [high1 ^ x[1] ^ k0, p1 & _WORD, high0 ^ x[3] ^ k1, p0 & _WORD]
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return x


class Streams(OfOneProcess):
    """The generators of K runs on one device. Neither a copy of it nor a forked process draws what the original draws."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._process, self._seeds, self.device = this_process(), list(seeds), device
        self._origin = "seeded, counter-based"
        self._rows = torch.tensor(self._seeds, dtype=torch.int64, device=device)

    @property
    def seeds(self) -> list[int]:
        self._here()
        return self._seeds

    @property
    def _seed_rows(self) -> Tensor:
        self._here()
        return self._rows

    def refresh(self) -> None:
        """Draw by seeds from the operating system's entropy from here on, whatever seeds were given."""
        self._seeds, self._origin = _os_seeds(len(self._seeds)), "os-entropy, counter-based"
        self._rows.copy_(torch.tensor(self._seeds, dtype=torch.int64))  # in place: captured steps read it

    def __reduce__(self) -> tuple[Callable[..., Streams], tuple[int, torch.device]]:
        return _fresh, (len(self._seeds), self.device)

    def normal(self, out: Tensor, step: Tensor, stream: int) -> Tensor:
        """Fill out, [K, P], with standard normals. ``step`` is a tensor of one number, read on the device.

        In double each is made from 64 random bits, as privacy noise must be; in single precision from 32, which is cheaper and
        enough for samples of θ.
        """
        each = 2 if out.dtype == torch.float64 else 4  # normals that a counter gives
        if out.is_cuda:
            from dpivon.privacy.kernels.random import normal

            k, p = out.shape
            block = 512
            normal[(-(-p // (each * block)), k)](out, self._seed_rows, step, p, STREAM=stream, BLOCK=block)
            return out
        p = out.shape[1]
        element = np.arange(-(-p // each))
        for row, seed in zip(out, self.seeds, strict=True):
            a, b, c, d = philox(seed, element, int(step), stream)
            if each == 2:
                row.copy_(torch.stack(_box_muller_double(a, b, c, d), 1).view(-1)[:p])
            else:
                values = np.stack([*_box_muller(a, b), *_box_muller(c, d)], 1).reshape(-1)[:p]
                row.copy_(torch.from_numpy(values))
        return out

    def words(self, run: Tensor, element: Tensor, step: Tensor, stream: int) -> list[Tensor]:
        """Four words of 32 random bits for every element [rows, n], each row from the stream of its run [rows].

        ``step`` is read on the device, and nothing comes back from it, so a captured graph draws anew on every replay.
        """
        seed = self._seed_rows[run.long()].unsqueeze(1)
        zero = torch.zeros_like(element)
        x = [element & _WORD, zero + (step & _WORD), zero + stream, zero]
        return _rounds(x, seed & _WORD, (seed >> 32) & _WORD)

    def orders(self, width: int, first_step: int, steps: int, *, begin: int = 0) -> Tensor:
        """[steps, K, width]: 0 … width − 1 in an order drawn uniformly for every step and run. Orders of one step are
        independent if no element from ``begin`` to ``begin + width`` belongs to both."""
        runs = torch.arange(len(self.seeds), device=self.device).repeat(steps)
        at = torch.arange(first_step, first_step + steps, device=self.device).repeat_interleave(len(self.seeds))
        element = torch.arange(begin, begin + width, device=self.device).expand(len(runs), width)
        high, low, *_ = self.words(runs, element, at.unsqueeze(1), SEATS)
        keys = (high << 31) | (low >> 1)  # 63 bits: as good as never equal
        return keys.argsort(1).view(steps, len(self.seeds), width)

    def poisson(self, examples: int, rates: Tensor, first_step: int, steps: int) -> Tensor:
        """[steps, K, examples] of 0 and 1: who is in which run's batch. ``rates`` are q·2³², whole numbers."""
        k = len(self.seeds)
        out = torch.empty(steps, k, examples, dtype=torch.int8, device=self.device)
        if out.is_cuda:
            from dpivon.privacy.kernels.random import poisson

            block = 1024
            # Made at once, since a copy to the device is waited for; every number 16 bytes from the next, as kernels like it.
            at = torch.arange(first_step, first_step + steps, device=self.device).repeat_interleave(2)
            for i in range(steps):
                poisson[(-(-examples // (4 * block)), k)](
                    out[i], rates, self._seed_rows, at[2 * i], examples, STREAM=SAMPLING, BLOCK=block
                )
            return out
        element = np.arange(-(-examples // 4))
        for i in range(steps):
            for j, seed in enumerate(self.seeds):
                words = np.stack(philox(seed, element, first_step + i, SAMPLING), 1).reshape(-1)[:examples]
                out[i, j] = torch.from_numpy((words < np.uint64(int(rates[j]))).astype(np.int8))
        return out


def _os_seeds(runs: int) -> list[int]:
    return [secrets.randbits(63) for _ in range(runs)]


def _fresh(runs: int, device: torch.device) -> Streams:
    streams = Streams([0] * runs, device)
    streams.refresh()
    return streams


def _box_muller(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    u = np.minimum((a.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(0.99999994))
    angle = np.float32(2 * np.pi) * (b.astype(np.float32) * np.float32(2.0**-32))
    r = np.sqrt(np.float32(-2.0) * np.log(u))
    return r * np.cos(angle), r * np.sin(angle)


def _box_muller_double(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> tuple[Tensor, Tensor]:
    """Two normals of two words each. The radius reaches √(2 ln 2⁶⁴) = 9.4, with odds of 2⁻⁶⁴."""
    u = (((a << np.uint64(32)) | b).astype(np.float64) + 1.0) * 2.0**-64  # in (0, 1], so the logarithm is finite
    v = (((c << np.uint64(32)) | d) >> np.uint64(11)).astype(np.float64)
    r = torch.from_numpy(u).log_().mul_(-2.0).sqrt_()  # torch's functions of doubles are vectorised
    angle = torch.from_numpy(v).mul_(2.0**-53 * 2 * math.pi)
    return r * angle.cos(), r * angle.sin()
