"""Bugs of the mechanism: what is added to the sum, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from program_bugs import normals, numbers, turn
from sowing import Patch, attr, both, everywhere, unrehearsed
from torch import Tensor

import dpivon.privacy.gradients.bookkeeping as bookkeeping
import dpivon.privacy.mechanism as mechanism
import dpivon.stacked.stack as stacked
from dpivon.privacy.layers.uses import Dense
from dpivon.privacy.mechanism import NoiseSpec
from dpivon.privacy.noise import TorchNoise
from dpivon.privacy.optimizer import DPOptimizer
from dpivon.privacy.stack import StackedMechanism
from dpivon.privacy.streams import POSTERIOR, PRIVACY, Streams
from dpivon.release import Release


def engine_release(change: Callable[..., Release]) -> Patch:
    """``change(original, sums, spec, noise, charge)`` in place of ``mechanism.release``."""
    return attr(mechanism, "release", lambda original: lambda *a: change(original, *a))


def stack_release(change: Callable[..., Tensor]) -> Patch:
    """``change(original, self, sums, step)`` in place of ``StackedMechanism.release``."""
    return attr(StackedMechanism, "release", lambda original: lambda self, *a: change(original, self, *a))


def noise_scaled(factor: Callable[[Any], float]) -> dict[str, Patch | str]:
    """Noise multiplied by a factor that is read off a spec."""

    def engine(original: Any, sums: Any, spec: Any, noise: Any, charge: Any) -> Release:
        class Scaled:
            def normal(self, like: Tensor, std: float) -> Tensor:
                return noise.normal(like, std) * factor(spec)

        return original(sums, spec, Scaled(), charge)

    def stacks(original: Any, self: Any, sums: Tensor, step: Tensor) -> Tensor:
        before = self.noise_std
        self.noise_std = before * torch.tensor([[factor(s)] for s in self.specs])
        try:
            return original(self, sums, step)
        finally:
            self.noise_std = before

    eager = engine_release(engine)
    program = numbers(lambda self, spec, std, divisor: (std * factor(spec), divisor))
    return everywhere(eager, stack_release(stacks), compiled=both(eager, program))


def drawn(change: Callable[[Tensor], Tensor]) -> dict[str, Patch | str]:
    """What the generators draw, changed."""

    def engine(original: Any) -> Any:
        return lambda self, like, std: change(original(self, like, std) / std) * std

    def stacks(original: Any) -> Any:
        def normal(self: Any, out: Tensor, step: Tensor, stream: int) -> Tensor:
            original(self, out, step, stream)
            if stream == PRIVACY:
                for row in out:
                    row.copy_(change(row))
            return out

        return normal

    eager, program = attr(TorchNoise, "normal", engine), normals(lambda draw, self, like: change(draw(like)))
    return everywhere(eager, attr(Streams, "normal", stacks), compiled=both(eager, program))


def same_noise_every_step() -> dict[str, Patch | str]:
    def engine(original: Any) -> Any:
        def normal(self: Any, like: Tensor, std: float) -> Tensor:
            kept = self.__dict__.setdefault("kept", {})
            if like.shape not in kept:
                kept[like.shape] = original(self, like, 1.0)
            return kept[like.shape] * std

        return normal

    def program(draw: Any, self: Any, like: Tensor) -> Tensor:
        kept: dict[int, Tensor] = self.__dict__.setdefault("kept", {})
        i = turn(self)
        return kept.setdefault(i, kept[i] if i in kept else draw(like))

    stacks = attr(Streams, "normal", lambda o: lambda self, out, t, s: o(self, out, 0 * t if s == PRIVACY else t, s))
    eager = attr(TorchNoise, "normal", engine)
    return everywhere(eager, stacks, compiled=both(eager, normals(program)))


def one_tensor_for_all_parameters() -> dict[str, Patch | str]:
    def engine(original: Any, sums: Any, spec: Any, noise: Any, charge: Any) -> Release:
        class Once:
            seen: Tensor | None = None

            def normal(self, like: Tensor, std: float) -> Tensor:
                if self.seen is None:
                    self.seen = noise.normal(like, std).flatten()
                return self.seen.repeat(-(-like.numel() // len(self.seen)))[: like.numel()].view_as(like)

        return original(sums, spec, Once(), charge)

    def stacks(original: Any) -> Any:
        def normal(self: Any, out: Tensor, step: Tensor, stream: int) -> Tensor:
            original(self, out, step, stream)
            if stream == PRIVACY:
                half = out.shape[1] // 2
                out[:, half : 2 * half] = out[:, :half]
            return out

        return normal

    def program(draw: Any, self: Any, like: Tensor) -> Tensor:
        if turn(self) == 0:
            self.seen = draw(like).flatten()
        seen: Tensor = self.seen
        return seen.repeat(-(-like.numel() // len(seen)))[: like.numel()].view_as(like)

    eager = engine_release(engine)
    return everywhere(eager, attr(Streams, "normal", stacks), compiled=both(eager, normals(program)))


def noise_before_clipping() -> dict[str, Patch | str]:
    """Every example's gradient is noised and then clipped; nothing is added to the sum."""
    silent = noise_scaled(lambda spec: 0.0)

    def merged(original: Any) -> Any:
        def merge(uses: Any) -> Any:
            g = original(uses).materialise()
            return Dense(g + torch.randn_like(g))

        return merge

    noised = attr(bookkeeping, "merge", merged)
    by_uses, program = (unrehearsed(both(noised, silent[path])) for path in ("bookkeeping", "compiled"))  # type: ignore[arg-type]
    return everywhere(by_uses, both(noised, silent["stacked"]), compiled=program)  # type: ignore[arg-type]


def langevin_noise_instead() -> dict[str, Patch | str]:
    """The release is not noised; the parameters are, after the step."""
    silent = noise_scaled(lambda spec: 0.0)

    def engine(original: Any) -> Any:
        def step(self: Any, closure: Any = None) -> Any:
            out = original(self, closure)
            with torch.no_grad():
                for p in self.params:
                    p.add_(self.spec.noise_std / self.spec.divisor * torch.randn_like(p))
            return out

        return step

    def stacks(original: Any) -> Any:
        def update(self: Any, sums: Tensor) -> None:
            original(self, sums)
            for part in self.parts:
                part.state["mean"].add_(0.01 * torch.randn_like(part.state["mean"]))

        return update

    moved = attr(DPOptimizer, "step", engine)
    return everywhere(
        both(moved, silent["bookkeeping"]),  # type: ignore[arg-type]
        both(attr(stacked.Stack, "_update", stacks), silent["stacked"]),  # type: ignore[arg-type]
        compiled=both(moved, silent["compiled"]),  # type: ignore[arg-type]
    )


def noise_of_theta() -> dict[str, Patch | str]:
    """Privacy noise is the draw that made θ."""

    def engine(original: Any) -> Any:
        def sampled(self: Any, train: bool = False) -> Any:
            inner, optimizer = original(self, train), self

            @contextmanager
            def block() -> Iterator[None]:
                means = [p.detach().clone() for p in optimizer.params]
                with inner:
                    moved = [p.detach() - m for p, m in zip(optimizer.params, means, strict=True)]
                    optimizer.drawn = [(d / (d.std() + 1e-30)).double() for d in moved]
                    yield

            return block()

        return sampled

    def release(original: Any, sums: Any, spec: Any, noise: Any, charge: Any) -> Release:
        draws = iter(noise.session.optimizer.drawn)

        class FromTheta:
            def normal(self, like: Tensor, std: float) -> Tensor:
                noise.normal(like, std)
                return next(draws).view_as(like) * std

        return original(sums, spec, FromTheta(), charge)

    def normal(original: Any) -> Any:
        def drawn(self: Any, out: Tensor, step: Tensor, stream: int) -> Tensor:
            return out.copy_(original(self, out.float(), step, POSTERIOR))  # in the precision in which θ is drawn

        return drawn

    def program(draw: Any, self: Any, like: Tensor) -> Tensor:
        draw(like)
        used = [t for group in self.rows.groups for t in group.split(group.normals)]
        return used[turn(self)].to(like).view_as(like)

    eager, stacks = (
        both(attr(DPOptimizer, "sampled_params", engine), engine_release(release)),
        attr(Streams, "normal", normal),
    )
    return everywhere(eager, stacks, compiled=normals(program))


def shared_seed() -> dict[str, Patch | str]:
    def streams(original: Any) -> Any:
        return lambda self, seeds, device: original(self, [seeds[0]] * len(seeds), device)

    def generators(original: Any) -> Any:
        def init(self: Any, generator: Any = None) -> None:
            original(self, torch.Generator().manual_seed(0))

        return init

    return everywhere(attr(TorchNoise, "__init__", generators), attr(Streams, "__init__", streams))


def noise_of_another_run() -> dict[str, Patch | str]:
    def first_std(original: Any, self: Any, sums: Tensor, step: Tensor) -> Tensor:
        self.noise_std = self.noise_std[:1].expand_as(self.noise_std)
        return original(self, sums, step)

    return everywhere("one run has one σ; there is no other run beside it", stack_release(first_std))


def noise_for_every_part() -> dict[str, Patch | str]:
    """Noise in every micro-batch of a logical batch, where the account knows one release."""

    def engine(original: Any) -> Any:
        def accumulate(self: Any) -> None:
            original(self)
            if self._check_skip_next_step(pop_next=False):
                for p in self.params:
                    p.summed_grad = p.summed_grad + self.noise.normal(p.summed_grad, self.spec.noise_std)

        return accumulate

    def parts(original: Any) -> Any:
        def step(self: Any, parts: Any) -> None:
            for part in parts:
                self._update(self.gradients.clipped_sums(self._theta(), self._batch(*part), self.mechanism.bound))

        return step

    return everywhere(attr(DPOptimizer, "clip_and_accumulate", engine), attr(stacked.Stack, "_step_in_parts", parts))


def wrong_variance(change: Callable[[Any], float]) -> dict[str, Patch | str]:
    engine = attr(mechanism, "as_release", lambda o: lambda gradients, spec: Release(gradients, change(spec)))

    def stacks(original: Any) -> Any:
        def init(self: Any, *args: Any) -> None:
            original(self, *args)
            self.variance = torch.tensor([[change(s)] for s in self.specs], dtype=torch.float32)

        return init

    program = lambda: mock.patch.object(NoiseSpec, "variance", property(change))  # noqa: E731
    return everywhere(engine, attr(StackedMechanism, "__init__", stacks), compiled=program)


def sigma_not_heard() -> dict[str, Patch | str]:
    """A scheduler changes σ: the new one is charged and stated, and noise is that of the first."""

    def engine(original: Any, sums: Any, spec: Any, noise: Any, charge: Any) -> Release:
        class First:
            def normal(self, like: Tensor, std: float) -> Tensor:
                made: Tensor = noise.normal(like, noise.__dict__.setdefault("first", std))
                return made

        return original(sums, spec, First(), charge)

    def program(self: Any, spec: Any, std: float, divisor: float) -> tuple[float, float]:
        return self.__dict__.setdefault("first", std), divisor

    eager = engine_release(engine)
    return everywhere(eager, "σ is fixed for the life of a stack", compiled=both(eager, numbers(program)))


def divided_by_the_drawn_batch() -> dict[str, Patch | str]:
    def engine(original: Any) -> Any:
        def release(self: Any, spec: Any) -> None:
            drawn = max(1, next((len(t) for t in self.watch.batch), 1))
            original(self, spec.replace(expected_batch_size=float(drawn)))

        return release

    def batch(original: Any) -> Any:
        def make(self: Any, *tensors: Tensor) -> Any:
            made = original(self, *tensors)
            self.mechanism.divisor = made.start.diff().clamp(min=1).double().unsqueeze(1)
            return made

        return make

    program = numbers(lambda self, spec, std, divisor: (std, float(max(1, self.program._filled))))
    return everywhere(attr(DPOptimizer, "_release", engine), attr(stacked.Stack, "_batch", batch), compiled=program)
