"""Bugs of batches: drawn otherwise than the account assumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from program_bugs import parts as cut_parts
from sowing import Patch, attr, both, everywhere
from torch import Tensor

import dpivon.stacked.stack as stacked
from dpivon.privacy.optimizer import DPOptimizer
from dpivon.privacy.sampling import PoissonSampler
from dpivon.privacy.stack import StackedSampler
from dpivon.privacy.streams import Streams


def batches(draw: Callable[[Any, int, float], Iterator[list[int]]]) -> dict[str, Patch | str]:
    """``draw(generator, N, q)`` yields index batches in place of the sampler's."""

    def engine(original: Any) -> Any:
        def iterate(self: Any) -> Iterator[list[int]]:
            source = draw(np.random.default_rng(self.generator.initial_seed()), self.num_samples, self.sample_rate)
            self.draws.begin_pass()
            for _ in range(self.steps):
                self.draws.draw()
                yield self._of_rank(torch.tensor(next(source), dtype=torch.int64))

        return iterate

    def stacks(original: Any) -> Any:
        def poisson(self: Any, examples: int, rates: Tensor, first_step: int, steps: int) -> Tensor:
            out = torch.zeros(steps, len(self.seeds), examples, dtype=torch.int8)
            for k, seed in enumerate(self.seeds):
                source = draw(np.random.default_rng(seed), examples, int(rates[k]) / 2**32)
                for i in range(first_step + steps):
                    rows = next(source)
                    if i >= first_step:
                        out[i - first_step, k, rows] = 1
            return out

        return poisson

    return everywhere(attr(PoissonSampler, "__iter__", engine), attr(Streams, "poisson", stacks))


def shuffled(generator: Any, n: int, q: float) -> Iterator[list[int]]:
    b = max(1, round(n * q))
    while True:
        order = generator.permutation(n)
        for i in range(0, n - b + 1, b):  # the rest is dropped
            yield order[i : i + b].tolist()


def fixed_size(generator: Any, n: int, q: float) -> Iterator[list[int]]:
    while True:
        yield generator.choice(n, max(1, round(n * q)), replace=False).tolist()


def with_replacement(generator: Any, n: int, q: float) -> Iterator[list[int]]:
    while True:
        yield generator.integers(0, n, max(1, round(n * q))).tolist()


def at_twice_the_rate(generator: Any, n: int, q: float) -> Iterator[list[int]]:
    while True:
        yield (generator.random(n) < min(1.0, 2 * q)).nonzero()[0].tolist()


def the_same_every_step(generator: Any, n: int, q: float) -> Iterator[list[int]]:
    batch = (generator.random(n) < q).nonzero()[0].tolist()
    while True:
        yield batch


def in_pairs(generator: Any, n: int, q: float) -> Iterator[list[int]]:
    while True:
        yield (np.repeat(generator.random(-(-n // 2)), 2)[:n] < q).nonzero()[0].tolist()


def empty_skipped() -> dict[str, Patch | str]:
    class Skipped(Exception):
        pass

    def release(original: Any) -> Any:
        def go(self: Any, spec: Any, program: Any = None) -> Any:
            sums = (p.summed_grad for p in self.params)
            if not (any(map(torch.any, sums)) if program is None else program.program._filled):
                raise Skipped
            return original(self, spec, program)

        return go

    def step(original: Any) -> Any:
        def go(self: Any, closure: Any = None) -> Any:
            try:
                return original(self, closure)
            except Skipped:
                return None

        return go

    def stacks(original: Any) -> Any:
        def update(self: Any, total: Tensor) -> None:
            if not bool(total.any()):
                self._t += 1
                self._position += 1
                return
            original(self, total)

        return update

    engine = both(attr(DPOptimizer, "_release", release), attr(DPOptimizer, "step", step))
    return everywhere(engine, attr(stacked.Stack, "_update", stacks))


def truncated() -> dict[str, Patch | str]:
    """What does not fit is cut off."""

    def draw(original: Any) -> Any:
        def cut(self: Any, *args: Any) -> Any:
            block = original(self, *args)
            block.overflows.clear()
            block.start.clamp_(max=self.capacity)
            return block

        return cut

    def step(original: Any) -> Any:
        """Only the last micro-batch counts."""

        def accumulate(self: Any) -> None:
            for p in self.params:
                p.summed_grad = None
            original(self)

        return accumulate

    def first(self: Any, parts: Any) -> Any:
        _, _, part = next(iter(parts))
        yield True, True, part

    last = attr(DPOptimizer, "clip_and_accumulate", step)
    return everywhere(last, attr(StackedSampler, "draw", draw), compiled=cut_parts(first))
