"""The release boundary of a stack: K runs sample, clip, and release at once, each under its own NoiseSpec and account."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpivon.errors import PrivacyError
from dpivon.privacy.accounting import Accountant
from dpivon.privacy.compiling import compiled
from dpivon.privacy.kernels.batch import Batch
from dpivon.privacy.spec import NoiseSpec
from dpivon.privacy.streams import PRIVACY, Streams


class StackedGradients(Protocol):
    """Clipped sums of K models: [K, P] in fp64."""

    def prepare(self, inputs: Tensor) -> Tensor:
        """The data set as :meth:`clipped_sums` reads it, once."""
        ...

    def clipped_sums(self, theta: Tensor, batch: Batch, bound: Tensor) -> Tensor: ...


class StackedMechanism:
    """Releases a row a run: g_dp = (Σ ḡ + N(0, σ²C²)) / b, row by row from the run's own stream.

    Charging comes first and by the block: :meth:`reserve` charges every run for n releases before any of them is
    launched, since a captured step runs without Python. What a crash leaves unused stays charged.
    """

    def __init__(self, specs: Sequence[NoiseSpec], streams: Streams, device: torch.device) -> None:
        self.specs, self.streams = list(specs), streams
        self.accountants = [Accountant("rdp") for _ in specs]
        column: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.noise_std = torch.tensor([[s.noise_std] for s in specs], **column)
        self.divisor = torch.tensor([[s.divisor] for s in specs], **column)
        self.variance = torch.tensor([[s.variance] for s in specs], dtype=torch.float32, device=device)
        self.bound = torch.tensor([_down(s.max_grad_norm) for s in specs], dtype=torch.float32, device=device)
        self.reserved = 0
        self._noise: Tensor | None = None
        self._combine = compiled(_combine, device)

    def reserve(self, releases: int) -> None:
        """Charge every run for so many releases."""
        for spec, accountant in zip(self.specs, self.accountants, strict=True):
            if spec.unaccounted:
                accountant.record_unaccounted(spec.unaccounted, releases)
            else:
                accountant.charge(noise_multiplier=spec.noise_multiplier, sample_rate=spec.sample_rate, steps=releases)
        self.reserved += releases

    def spend(self) -> None:
        """One reserved release is about to be launched."""
        if self.reserved < 1:
            raise PrivacyError("A release that was not reserved: call reserve(n) before launching n steps.")
        self.reserved -= 1

    def release(self, sums: Tensor, step: Tensor) -> Tensor:
        """[K, P] in fp32. The noise of step t is drawn once; ``step`` is read on the device."""
        if self._noise is None or self._noise.shape != sums.shape:
            self._noise = torch.empty(sums.shape, dtype=torch.float32, device=sums.device)
        noise = self.streams.normal(self._noise, step, PRIVACY)
        return self._combine(sums, noise, self.noise_std, self.divisor)


@dataclass(frozen=True)
class BatchBlock:
    """The Poisson batches of the next n steps of all runs, drawn ahead."""

    index: Tensor  # [n, capacity], which example
    model: Tensor  # [n, capacity], whose
    start: Tensor  # [n, K + 1]
    places: Tensor  # [n, K, most]
    seats: Tensor  # [n, capacity]
    overflows: list[int]  # steps whose batches do not fit, to be run in parts


class StackedSampler:
    """Poisson batches of K runs, packed one after the other.

    The capacity is passed about once in a thousand steps; a step that needs more is run in parts of the same release, never
    cut.
    """

    def __init__(self, specs: Sequence[NoiseSpec], examples: int, streams: Streams, device: torch.device) -> None:
        self.streams, self.examples, self.device = streams, examples, device
        self.runs = len(specs)
        # Rounded down: a rate above the one that is charged would make ε too small.
        self.rates = torch.tensor([int(s.sample_rate * 2**32) for s in specs], dtype=torch.int64, device=device)
        expected = [s.sample_rate * examples for s in specs]
        self.capacity = min(_room(sum(expected)), self.runs * examples)
        self.most = min(max(_room(e, among=self.runs) for e in expected), examples)

    def draw(self, first_step: int, steps: int) -> BatchBlock:
        mask = self.streams.poisson(self.examples, self.rates, first_step, steps)
        step, run, example = mask.nonzero(as_tuple=True)  # in order: by step, then run, then example
        counts = torch.bincount(step * self.runs + run, minlength=steps * self.runs).view(steps, self.runs)
        ends = counts.cumsum(1)
        start = torch.nn.functional.pad(ends, (1, 0))
        totals = ends[:, -1]
        step_start = totals.cumsum(0) - totals
        position = torch.arange(len(step), device=self.device) - step_start[step]
        rank = position - start[step, run]
        fits = (position < self.capacity) & (rank < self.most)
        overflows = ((totals > self.capacity) | (counts.max(1).values > self.most)).nonzero().flatten().tolist()
        index = torch.zeros(steps, self.capacity, dtype=torch.int64, device=self.device)
        model = torch.zeros(steps, self.capacity, dtype=torch.int32, device=self.device)
        places = torch.full((steps, self.runs, self.most), self.capacity, dtype=torch.int64, device=self.device)
        seats = torch.zeros(steps, self.capacity, dtype=torch.int64, device=self.device)
        step, run, example, position, rank = (t[fits] for t in (step, run, example, position, rank))
        index[step, position] = example
        model[step, position] = run.int()
        places[step, run, rank] = position
        seats[step, position] = run * self.most + rank
        return BatchBlock(index, model, start.int(), places, seats, overflows)

    def parts(self, step: int) -> list[tuple[Tensor, ...]]:
        """One step's batches in as many parts as fit: (index, model, start, places, seats) each."""
        mask = self.streams.poisson(self.examples, self.rates, step, 1)[0].bool()
        rank = mask.cumsum(1) - 1
        out: list[tuple[Tensor, ...]] = []
        low = 0
        share = max(1, min(self.most, self.capacity // self.runs))
        while low <= int(rank.max()):
            part = mask & (rank >= low) & (rank < low + share)
            run, example = part.nonzero(as_tuple=True)
            counts = part.sum(1)
            start = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
            position = torch.arange(len(run), device=self.device)
            index = torch.zeros(self.capacity, dtype=torch.int64, device=self.device)
            model = torch.zeros(self.capacity, dtype=torch.int32, device=self.device)
            places = torch.full((self.runs, self.most), self.capacity, dtype=torch.int64, device=self.device)
            index[position], model[position] = example, run.int()
            seats = torch.zeros_like(index)
            places[run, position - start[run]] = position
            seats[position] = run * self.most + position - start[run]
            out.append((index, model, start.int(), places, seats))
            low += share
        return out


def _combine(sums: Tensor, noise: Tensor, noise_std: Tensor, divisor: Tensor) -> Tensor:
    return ((sums + noise.double() * noise_std) / divisor).float()


def _down(c: float) -> float:
    """The largest fp32 number that is at most c: the noise is calibrated to c itself."""
    nearest = np.float32(c)
    return float(nearest if float(nearest) <= c else np.nextafter(nearest, np.float32(0)))


def _room(expected: float, among: int = 1) -> int:
    """A size that one of so many Poisson batches passes with probability of about a thousandth."""
    return int(expected + NormalDist().inv_cdf(1 - 1e-3 / among) * expected**0.5 + 2)
