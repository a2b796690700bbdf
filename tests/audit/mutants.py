"""Bugs sown on purpose, each a patch at run time: (what is wrong, on which paths, how it is done, which checks should see it).

Each weakens the guarantee or the stated behaviour. ``paths`` maps a path to the patch for it, or to the reason why the bug
cannot be had there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import dpivon.privacy.clipping as clipping
import dpivon.privacy.gradients.bookkeeping as bookkeeping
import dpivon.privacy.mechanism as mechanism
import dpivon.stacked.stack as stacked
from dpivon.audit.subject import PATHS, STACK_PATHS
from dpivon.optim.ivon import IVON
from dpivon.posterior import Posterior
from dpivon.privacy.accounting import Accountant, rdp
from dpivon.privacy.clipping import FlatClipping
from dpivon.privacy.engine import PrivacyEngine
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.gradients.ghost import GhostCriterion, GhostGradients
from dpivon.privacy.gradients.per_example import PerExampleGradients
from dpivon.privacy.kernels.padded import PaddedGradients
from dpivon.privacy.kernels.reference import LoopedGradients
from dpivon.privacy.layers.uses import Dense
from dpivon.privacy.noise import TorchNoise
from dpivon.privacy.optimizer import DPOptimizer
from dpivon.privacy.ranks.group import Group
from dpivon.privacy.ranks.replicated import Replicated
from dpivon.privacy.sampling import PoissonSampler
from dpivon.privacy.stack import StackedMechanism, StackedSampler
from dpivon.privacy.streams import POSTERIOR, PRIVACY, Streams
from dpivon.release import Release

Patch = Callable[[], Any]  # makes a context manager
GRADIENTS = {
    "hooks": PerExampleGradients,
    "functorch": PerExampleGradients,
    "bookkeeping": BookKeeper,
    "ghost": GhostGradients,
    "distributed": BookKeeper,
    "stacked": LoopedGradients,
    "captured": PaddedGradients,
}


@dataclass(frozen=True)
class Mutant:
    name: str
    bug: str
    expect: str  # part of the name of the check that should see it first
    paths: dict[str, Patch | str] = field(default_factory=dict)


def attr(target: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """Replace an attribute by what ``make`` makes of the original."""
    return lambda: mock.patch.object(target, name, make(getattr(target, name)))


def both(*patches: Patch) -> Patch:
    @contextmanager
    def entered() -> Iterator[None]:
        with patches[0]():
            if len(patches) == 1:
                yield
            else:
                with both(*patches[1:])():
                    yield

    return entered


def everywhere(engine: Patch | str, stacks: Patch | str, **special: Patch | str) -> dict[str, Patch | str]:
    return {path: special.get(path, stacks if path in STACK_PATHS else engine) for path in PATHS}


# ---- the mechanism


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

    return everywhere(engine_release(engine), stack_release(stacks))


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

    return everywhere(attr(TorchNoise, "normal", engine), attr(Streams, "normal", stacks))


def same_noise_every_step() -> dict[str, Patch | str]:
    def engine(original: Any) -> Any:
        def normal(self: Any, like: Tensor, std: float) -> Tensor:
            kept = self.__dict__.setdefault("kept", {})
            if like.shape not in kept:
                kept[like.shape] = original(self, like, 1.0)
            return kept[like.shape] * std

        return normal

    stacks = attr(Streams, "normal", lambda o: lambda self, out, t, s: o(self, out, 0 * t if s == PRIVACY else t, s))
    return everywhere(attr(TorchNoise, "normal", engine), stacks)


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

    return everywhere(engine_release(engine), attr(Streams, "normal", stacks))


def noise_before_clipping() -> dict[str, Patch | str]:
    """Every example's gradient is noised and then clipped; nothing is added to the sum."""
    silent = noise_scaled(lambda spec: 0.0)

    def rows(original: Any) -> Any:
        return lambda self, params: [r + torch.randn_like(r) for r in original(self, params)]

    def merged(original: Any) -> Any:
        def merge(uses: Any) -> Any:
            g = original(uses).materialise()
            return Dense(g + torch.randn_like(g))

        return merge

    reason = "a second backward makes the sum, no per-example gradient is there to be noised"
    by_rows = both(attr(PerExampleGradients, "_rows", rows), silent["hooks"])  # type: ignore[arg-type]
    by_uses = both(attr(bookkeeping, "merge", merged), silent["bookkeeping"])  # type: ignore[arg-type]
    in_stack = both(attr(bookkeeping, "merge", merged), silent["stacked"])  # type: ignore[arg-type]
    return {
        "hooks": by_rows,
        "functorch": by_rows,
        "bookkeeping": by_uses,
        "ghost": reason,
        "distributed": by_uses,
        "stacked": in_stack,
        "captured": in_stack,
    }


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

    return everywhere(
        both(attr(DPOptimizer, "step", engine), silent["hooks"]),  # type: ignore[arg-type]
        both(attr(stacked.Stack, "_update", stacks), silent["stacked"]),  # type: ignore[arg-type]
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

    stacks = attr(Streams, "normal", lambda o: lambda self, out, t, s: o(self, out, t, POSTERIOR))
    return everywhere(both(attr(DPOptimizer, "sampled_params", engine), engine_release(release)), stacks)


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
        def step(self: Any) -> None:
            for part in self.sampler.parts(int(self._t)):
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

    return everywhere(engine, attr(StackedMechanism, "__init__", stacks))


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

    return everywhere(attr(DPOptimizer, "_release", engine), attr(stacked.Stack, "_batch", batch))


# ---- clipping


def factors(change: Callable[[Any, Any, Tensor], Tensor], *, joint: bool = True) -> Patch:
    """``change(original, self, norms)`` in place of the clip factors."""
    own = attr(FlatClipping, "factors", lambda original: lambda self, norms: change(original, self, norms))
    return own if joint else both(own, lambda: mock.patch.object(FlatClipping, "joint", False))


def norms_without(drop: Callable[[int], list[int]]) -> dict[str, Patch | str]:
    """Norms that leave out some of the parameters: ``drop`` of how many gives which."""

    def change(original: Any, self: Any, norms: Tensor) -> Tensor:
        norms = norms.clone()
        if len(norms) > 1:
            norms[drop(len(norms))] = 0.0
        return original(self, norms)

    return everywhere(factors(change, joint=False), factors(change, joint=False))


def clipped_apart(groups: Callable[[int], list[slice]]) -> dict[str, Patch | str]:
    """Every group of parameters is clipped to C by itself."""

    def change(original: Any, self: Any, norms: Tensor) -> Tensor:
        return torch.cat([original(self, norms[g]) for g in groups(len(norms))])

    reason = "ghost clipping weights an example's loss, and so all of its gradient: it cannot clip parameters apart"
    return everywhere(factors(change, joint=False), factors(change, joint=False), ghost=reason)


def no_clipping() -> dict[str, Patch | str]:
    patch = factors(lambda original, self, norms: torch.ones_like(norms))
    return everywhere(patch, patch)


def not_finite() -> dict[str, Patch | str]:
    """The factor of an example that is not finite is what arithmetic makes of it."""
    keep = attr(clipping, "_factor", lambda o: lambda norm, bound: (bound / (norm + 1e-6)).clamp(max=1.0))
    return everywhere(keep, keep)


def sums(change: Callable[[Any, tuple[Any, ...]], Any]) -> dict[str, Patch | str]:
    """``change(original bound to its object, arguments)`` in place of a path's clipped sums."""
    return {
        path: attr(
            kind, "clipped_sums", lambda original: lambda self, *a: change(lambda *b: original(self, *(b or a)), a)
        )
        for path, kind in GRADIENTS.items()
    }


def rounded(total: Any) -> Any:
    if isinstance(total, list):
        return [t.bfloat16().to(t.dtype) for t in total]
    return total.bfloat16().to(total.dtype)


def clip_the_batch() -> dict[str, Patch | str]:
    """The gradient of the batch is clipped to C, not that of each example."""

    def change(call: Any, args: tuple[Any, ...]) -> Any:
        with attr(FlatClipping, "factors", lambda o: lambda self, norms: (norms.sum(0) * 0 + 1).expand_as(norms))():
            total = call()
        if isinstance(total, list):
            norm = torch.sqrt(sum(t.double().square().sum() for t in total))
            return [t * min(1.0, args[1].sensitivity / (float(norm) + 1e-6)) for t in total]
        norm = total.norm(dim=1, keepdim=True)
        return total * (args[2].double().unsqueeze(1) / (norm + 1e-6)).clamp(max=1.0)

    patches = sums(change)

    def backward(original: Any) -> Any:
        def clip(self: Any, losses: Tensor) -> None:
            with factors(lambda o, s, norms: torch.ones_like(norms))():
                original(self, losses)
            params, bound = self._params(), self._clipping().sensitivity
            norm = torch.sqrt(sum(p.grad.square().sum() for p in params if p.grad is not None) + torch.zeros(()))
            for p in params:
                if p.grad is not None:
                    p.grad = p.grad * min(1.0, bound / (float(norm) + 1e-6))
            self._source.written(params)

        return clip

    return {**patches, "ghost": attr(GhostCriterion, "backward", backward)}


def clip_the_share_of_the_mean() -> dict[str, Patch | str]:
    """C is applied to g_i/b, an example's share of the mean, and b is multiplied back."""
    b = 12.0

    def change(original: Any, self: Any, norms: Tensor) -> Tensor:
        return original(self, norms / b)

    patch = factors(change)
    return everywhere(patch, patch)


def counted_twice() -> dict[str, Patch | str]:
    """Every first example of a batch enters the sum twice."""

    def change(original: Any, self: Any, norms: Tensor) -> Tensor:
        out = original(self, norms).clone()
        out[:, :1] *= 2.0
        return out

    patch = factors(change)
    return everywhere(patch, patch)


def stale_sum() -> dict[str, Patch | str]:
    """The sum of the last batch is still there when the next one is added."""
    kept: dict[str, Any] = {}

    def add(key: str) -> Callable[[Any, tuple[Any, ...]], Any]:
        def change(call: Any, args: tuple[Any, ...]) -> Any:
            total = call()
            last = kept.get(key)
            kept[key] = total
            if last is None or isinstance(last, list) != isinstance(total, list):
                return total
            if isinstance(total, list):
                same = len(last) == len(total) and all(a.shape == b.shape for a, b in zip(last, total, strict=True))
                return [a + b for a, b in zip(last, total, strict=True)] if same else total
            return total + last if last.shape == total.shape else total

        return change

    return {path: sums(add(path))[path] for path in PATHS}


def stale_parts() -> dict[str, Patch | str]:
    """A batch that was abandoned stays in the accumulator, and no guard asks."""

    def abandon(original: Any) -> Any:
        def keep(self: Any) -> None:
            self._micro_batch_is_last = None
            self._step_skip_queue.clear()
            self._forget_pending_passes()

        return keep

    unasked = attr(DPOptimizer, "_check_micro_batch_is_new", lambda original: lambda self: None)
    patch = both(attr(DPOptimizer, "abandon_virtual_batch", abandon), unasked)
    return everywhere(patch, "parts of a batch are summed in one call; nothing of them outlives it")


def cross_terms_dropped() -> dict[str, Patch | str]:
    def merged(original: Any) -> Any:
        def merge(uses: Any) -> Any:
            whole = original(uses)
            if len(uses) == 1:
                return whole

            class Parted(Dense):
                def squared_norm(self) -> Tensor:
                    return sum(u.squared_norm() for u in uses)  # type: ignore[return-value]

                def materialise(self) -> Tensor:
                    return self.g

            return Parted(whole.materialise())

        return merge

    # Small parameters are put side by side and their norm is taken of that, so the uses must stay apart here.
    apart = both(attr(bookkeeping, "merge", merged), lambda: mock.patch.object(bookkeeping, "_SMALL", 0))
    whole = "the norm is taken of the whole gradient, in which the uses have been added up"
    refused = "ghost mode refuses a layer that is used twice"
    return {
        "hooks": whole,
        "functorch": whole,
        "ghost": refused,
        "bookkeeping": apart,
        "distributed": apart,
        "stacked": apart,
        "captured": apart,
    }


def theta_samples_clipped_apart() -> dict[str, Patch | str]:
    """Each of K θ-samples is clipped by itself, and the sum has all of them under one charge."""

    def end(original: Any) -> Any:
        def collect(self: Any, params: Any, samples: int) -> None:
            for p, rows in zip(params, self._rows(params), strict=True):
                self._average[p] = torch.cat([self._average[p], rows]) if p in self._average else rows
                p.grad_sample = self._average[p]
                p.grad = None

        return collect

    def merged(original: Any) -> Any:
        def merge(uses: Any) -> Any:
            if len(uses) < 3:
                return original(uses)
            each = len(uses) // 3  # uses in one of three θ-samples
            samples = [original(uses[i : i + each]).materialise() for i in range(0, len(uses), each)]
            return Dense(torch.cat(samples))

        return merge

    rows = attr(PerExampleGradients, "end_of_sample", end)
    reason = "one θ-sample a step"
    apart = attr(bookkeeping, "merge", merged)
    return {
        "hooks": rows,
        "functorch": rows,
        "bookkeeping": apart,
        "distributed": apart,
        "ghost": "ghost mode refuses more than one θ-sample a step",
        "stacked": reason,
        "captured": reason,
    }


def old_bound() -> dict[str, Patch | str]:
    """A scheduler changes C in the spec, and clipping keeps the old one."""
    keep = attr(FlatClipping, "rescaled", lambda original: lambda self, bound: self)
    return everywhere(keep, "C is fixed for the life of a stack")


def rounded_norms() -> dict[str, Patch | str]:
    def change(original: Any, self: Any, norms: Tensor) -> Tensor:
        return original(self, norms.bfloat16().to(norms.dtype))

    patch = factors(change)
    return everywhere(patch, patch)


def biases_left_out() -> dict[str, Patch | str]:
    """Rows of the norm table that belong to vectors: every second one in these networks, and more if blocks are merged."""
    return norms_without(lambda n: list(range(1, n, 2)))


# ---- who learns from what


def raw_gradient(where: str) -> dict[str, Patch | str]:
    """Momentum or curvature reads the clipped sum before its noise."""

    def engine(original: Any) -> Any:
        def evidence(self: Any, group: Any, params: Any, release: Any) -> Any:
            made = original(self, group, params, release)
            if release is None:
                return made
            raw = [(p.summed_grad / 13.0).to(h.dtype) for p, h in zip(params, made.hess, strict=True)]
            listed = type(made.g)(raw)
            from dataclasses import replace

            return replace(made, g=listed) if where == "momentum" else replace(made, g_squared=listed.square())

        return evidence

    def update(original: Any) -> Any:
        def stash(self: Any, total: Tensor) -> None:
            self.raw = (total / 13.0).float()
            original(self, total)

        return stash

    def rows(original: Any) -> Any:
        def apply(self: Any, g: Tensor, eps: Tensor, t: Tensor, states: Any) -> None:
            if where == "momentum":
                return original(self, self.raw, eps, t, states)
            before = [{k: v.clone() for k, v in part.state.items()} for part in self.parts]
            original(self, g, eps, t, states)
            for part, old in zip(self.parts, before, strict=True):
                if "hess" in old:
                    new = part.rule.step(old, self.raw[part.rows], eps[part.rows], t, part.hyper)
                    part.state["hess"].copy_(new["hess"])
            return None

        return apply

    return everywhere(
        attr(IVON, "_evidence", engine),
        both(attr(stacked.Stack, "_update", update), attr(stacked.Stack, "_update_rows", rows)),
    )


def posterior_reads_data() -> dict[str, Patch | str]:
    """The width that is handed out depends on the private sums."""

    def posterior(original: Any) -> Any:
        def widened(self: Any, model: Any = None) -> Posterior:
            q = original(self, model)
            extra = sum(float(p.summed_grad.abs().sum()) for p in self.params if p.summed_grad is not None)
            return Posterior(q.mean, {k: v * (1 + extra) for k, v in q.variance.items()}, metadata=dict(q.metadata))

        return widened

    def stash(original: Any) -> Any:
        def update(self: Any, total: Tensor) -> None:
            self.raw = float(total.abs().sum())
            original(self, total)

        return update

    std = property(lambda self: torch.cat([stacked._std(p) for p in self.parts]) * (1 + self.raw))
    return everywhere(
        attr(DPOptimizer, "posterior", posterior),
        both(attr(stacked.Stack, "_update", stash), lambda: mock.patch.object(stacked.Stack, "std", std)),
    )


# ---- batches


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
        def go(self: Any, spec: Any) -> None:
            if not any(bool(p.summed_grad.any()) for p in self.params):
                raise Skipped
            original(self, spec)

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

    return everywhere(attr(DPOptimizer, "clip_and_accumulate", step), attr(StackedSampler, "draw", draw))


# ---- the account


def charged_late() -> dict[str, Patch | str]:
    def engine(original: Any, sums: Any, spec: Any, noise: Any, charge: Any) -> Release:
        made = original(sums, spec, noise, lambda spec: None)
        charge(spec)
        return made

    def train(original: Any) -> Any:
        def late(self: Any, steps: int) -> Iterator[int]:
            reserve, self.mechanism.reserve = self.mechanism.reserve, lambda n: setattr(self.mechanism, "reserved", n)
            try:
                for done in original(self, steps):
                    reserve(1)
                    self.mechanism.reserved = 0
                    yield done
            finally:
                self.mechanism.reserve = reserve

        return late

    return everywhere(engine_release(engine), attr(stacked.Stack, "train", train))


def charges(engine: Callable[..., Any], stacks: Callable[..., Any]) -> dict[str, Patch | str]:
    return everywhere(attr(PrivacyEngine, "_charge", engine), attr(StackedMechanism, "reserve", stacks))


def not_charged() -> dict[str, Patch | str]:
    return charges(
        lambda o: lambda self, spec: None, lambda o: lambda self, n: setattr(self, "reserved", self.reserved + n)
    )


def charged_every_other() -> dict[str, Patch | str]:
    def engine(original: Any) -> Any:
        def charge(self: Any, spec: Any) -> None:
            self.turn = getattr(self, "turn", 0) + 1
            if self.turn % 2:
                original(self, spec)

        return charge

    def stacks(original: Any) -> Any:
        def reserve(self: Any, n: int) -> None:
            self.turn = getattr(self, "turn", 0) + 1
            if self.turn % 2:
                original(self, n)
            else:
                self.reserved += n

        return reserve

    return charges(engine, stacks)


def charged_as(**change: Callable[[float], float]) -> dict[str, Patch | str]:
    """The account gets another σ or q than was used."""

    def charge(original: Any) -> Any:
        def other(self: Any, *, noise_multiplier: float, sample_rate: float, steps: int = 1) -> None:
            values = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate}
            original(self, steps=steps, **{k: change[k](v) if k in change else v for k, v in values.items()})

        return other

    patch = attr(Accountant, "charge", charge)
    return everywhere(patch, patch)


def too_small_epsilon() -> dict[str, Patch | str]:
    patch = attr(rdp, "epsilon", lambda original: lambda *a: 0.5 * original(*a))
    return everywhere(patch, patch)


def roundings_dropped() -> dict[str, Patch | str]:
    return everywhere(
        "nothing is compiled",
        "nothing is compiled on a CPU",
        captured="needs a GPU: tests/gpu holds the compiled program to C",
    )


# ---- several ranks


def between_ranks(patch: Patch) -> dict[str, Patch | str]:
    """A bug in what ranks do together."""
    return dict.fromkeys(PATHS, "one process: nothing is shared or added up between ranks") | {"distributed": patch}


def team_release(change: Callable[..., Any]) -> Patch:
    """``change(original, self, optimizer, sums, spec)`` in place of what ranks do with their sums."""
    return attr(
        Replicated, "release", lambda original: lambda self, *a: change(lambda *b: original(self, *b), self, *a)
    )


def reduced(change: Callable[[Any, Group, Tensor], Tensor | None]) -> Patch:
    """``change(original, group, flat sums)`` in place of the sum over ranks."""
    return attr(Group, "sum_to_first", lambda original: lambda self, flat: change(original, self, flat))


def every_rank_adds_noise() -> dict[str, Patch | str]:
    def change(call: Any, self: Any, optimizer: Any, sums: Any, spec: Any) -> Any:
        if not self.group.first:
            sums = {p: s + optimizer.noise.normal(s, spec.noise_std) for p, s in sums.items()}
        return call(optimizer, sums, spec)

    return between_ranks(team_release(change))


def ranks_share_their_noise() -> dict[str, Patch | str]:
    """Each rank adds its W-th of the variance, all from one seed."""

    def change(call: Any, self: Any, optimizer: Any, sums: Any, spec: Any) -> Any:
        generator = torch.Generator().manual_seed(self.releases)
        share = spec.noise_std / self.world**0.5
        sums = {p: s + share * torch.randn(s.shape, generator=generator, dtype=s.dtype) for p, s in sums.items()}
        with engine_release(lambda o, total, spec, noise, charge: o(total, spec, Silent(), charge))():
            return call(optimizer, sums, spec)

    class Silent:
        def normal(self, like: Tensor, std: float) -> Tensor:
            return torch.zeros_like(like)

    return between_ranks(team_release(change))


def ranks_noise_apart() -> dict[str, Patch | str]:
    """Every rank noises the one sum itself: W releases under one charge."""

    def follow(original: Any) -> Any:
        def own(self: Any, optimizer: Any, sums: Any, spec: Any, charge: Any) -> Release:
            made = original(self, optimizer, sums, spec, charge)
            noisy = {p: g + spec.noise_std / spec.divisor * torch.randn_like(g) for p, g in made.gradients.items()}
            return Release(noisy, made.variance, made.batch_size)

        return own

    return between_ranks(attr(Replicated, "_follow", follow))


def averaged_over_ranks() -> dict[str, Patch | str]:
    def change(original: Any, group: Any, flat: Tensor) -> Tensor | None:
        total = original(group, flat)
        return None if total is None else total / group.world

    return between_ranks(reduced(change))


def other_ranks_lost() -> dict[str, Patch | str]:
    def change(original: Any, group: Any, flat: Tensor) -> Tensor | None:
        total = original(group, flat)
        return None if total is None else flat

    return between_ranks(reduced(change))


def reduced_in_bf16() -> dict[str, Patch | str]:
    return between_ranks(reduced(lambda original, group, flat: original(group, flat.bfloat16().to(flat.dtype))))


def clipped_after_reduction(where: str) -> dict[str, Patch | str]:
    """Examples are not clipped; the sum of a rank, or of all of them, is."""
    bound = 0.7

    def change(original: Any, group: Any, flat: Tensor) -> Tensor | None:
        clip = lambda t: t * min(1.0, bound / (float(t.norm()) + 1e-6))  # noqa: E731
        if where == "rank":
            return original(group, clip(flat))
        total = original(group, flat)
        return None if total is None else clip(total)

    return between_ranks(both(reduced(change), factors(lambda o, self, norms: torch.ones_like(norms))))


def theta_of_each_rank() -> dict[str, Patch | str]:
    def begin(original: Any) -> Any:
        def apart(self: Any, module: Any, optimizer: Any) -> None:
            original(self, module, optimizer)
            if isinstance(optimizer.original_optimizer, IVON):
                optimizer.original_optimizer.generator.manual_seed(self.rank)

        return apart

    return between_ranks(attr(Replicated, "begin", begin))


def all_of_the_batch_on_every_rank() -> dict[str, Patch | str]:
    return between_ranks(attr(PoissonSampler, "_of_rank", lambda original: lambda self, drawn: drawn.tolist()))


def empty_part_skipped() -> dict[str, Patch | str]:
    """A rank that got no example of a batch does not take part in its release."""

    def change(call: Any, self: Any, optimizer: Any, sums: Any, spec: Any) -> Any:
        empty = not any(bool(s.any()) for s in sums.values())
        return None if empty and not self.group.first else call(optimizer, sums, spec)

    return between_ranks(team_release(change))


def other_ranks_do_not_charge() -> dict[str, Patch | str]:
    def follow(original: Any) -> Any:
        return lambda self, optimizer, sums, spec, charge: original(self, optimizer, sums, spec, lambda spec: None)

    return between_ranks(attr(Replicated, "_follow", follow))


def mutants() -> list[Mutant]:
    width, definition, moves = "gaussian of the stated width", "definition", "one example moves"
    first_once, poisson = "charged first", "poisson samples"
    return [
        Mutant("no noise", "nothing is added to the sum", width, noise_scaled(lambda s: 0.0)),
        Mutant("half the noise", "σ/2 is added where σ is charged", width, noise_scaled(lambda s: 0.5)),
        Mutant(
            "noise divided by the batch",
            "std σC/b on the sum",
            width,
            noise_scaled(lambda s: 1 / s.expected_batch_size),
        ),
        Mutant(
            "noise too small by 1.25",
            "what the canaries must notice",
            "canaries in single",
            noise_scaled(lambda s: 0.8),
        ),
        Mutant(
            "noise not Gaussian",
            "uniform, of the right variance",
            width,
            drawn(lambda z: torch.erf(z / 2**0.5) * 3**0.5),
        ),
        Mutant("noise with its tails cut", "|z| ≤ 2 only", width, drawn(lambda z: z.clamp(-2, 2))),
        Mutant(
            "noise reused across steps",
            "two releases subtract to the data",
            "across coordinates",
            same_noise_every_step(),
        ),
        Mutant(
            "noise reused across parameters",
            "one tensor for all",
            "across coordinates",
            one_tensor_for_all_parameters(),
        ),
        Mutant("noise before clipping", "examples are noised, the sum is not", width, noise_before_clipping()),
        Mutant(
            "Langevin noise counted as privacy noise",
            "parameters are noised, not the release",
            width,
            langevin_noise_instead(),
        ),
        Mutant("privacy noise is θ's noise", "one draw for both", "posterior noise", noise_of_theta()),
        Mutant("runs share a seed", "two runs subtract to the data", "two runs", shared_seed()),
        Mutant("σ of another run of the stack", "the first run's for all", "two runs", noise_of_another_run()),
        Mutant(
            "noise for every part of a batch", "several noisy parts, one charge", "in parts", noise_for_every_part()
        ),
        Mutant(
            "correction without the divisor",
            "told (σC)², not (σC/b)²",
            "sigma c over b",
            wrong_variance(lambda s: s.noise_std**2),
        ),
        Mutant("correction of nothing", "told that there is no noise", "sigma c over b", wrong_variance(lambda s: 0.0)),
        Mutant("divided by the drawn batch", "its size is private", definition, divided_by_the_drawn_batch()),
        Mutant("no clipping", "every factor is 1", moves, no_clipping()),
        Mutant("clipping of the batch, not of examples", "‖Σg‖ ≤ C", definition, clip_the_batch()),
        Mutant("clipping of the share of the mean", "C on g/b: b·C in the sum", moves, clip_the_share_of_the_mean()),
        Mutant(
            "C for every tensor", "√L·C in all", moves, clipped_apart(lambda n: [slice(i, i + 1) for i in range(n)])
        ),
        Mutant(
            "two halves clipped apart",
            "as a variational mean and its variance: √2·C",
            moves,
            clipped_apart(lambda n: [slice(0, n // 2), slice(n // 2, n)] if n > 1 else [slice(0, n)]),
        ),
        Mutant(
            "norm over a part of the parameters",
            "the last layer is left out",
            moves,
            norms_without(lambda n: [n - 2, n - 1]),
        ),
        Mutant("biases left out of the norm", "every second tensor", moves, biases_left_out()),
        Mutant("a bad example is kept", "NaN and Inf enter the sum", moves, not_finite()),
        Mutant("an example counted twice", "2C", moves, counted_twice()),
        Mutant("stale gradients", "the last batch is in the next sum", definition, stale_sum()),
        Mutant("a stale part after an exception", "an abandoned batch is in the next sum", "was left", stale_parts()),
        Mutant(
            "cross terms of shared weights dropped", "norms of the uses, not of their sum", moves, cross_terms_dropped()
        ),
        Mutant("θ-samples clipped apart", "K·C under one charge", "samples of theta", theta_samples_clipped_apart()),
        Mutant(
            "a scheduler's C not heard by clipping", "noise for the new, sums of the old", "changed bound", old_bound()
        ),
        Mutant("sums in bf16", "rounded by more than an example", "coherent", sums(lambda call, args: rounded(call()))),
        Mutant("norms in bf16", "too small by up to 0.4 %", moves, rounded_norms()),
        Mutant("compiled roundings dropped", "norms of other numbers than are summed", "coherent", roundings_dropped()),
        Mutant("raw gradient in momentum", "past the boundary", "frozen", raw_gradient("momentum")),
        Mutant("raw gradient in curvature", "past the boundary", "frozen", raw_gradient("curvature")),
        Mutant("posterior that reads data", "its width depends on the sums", "frozen", posterior_reads_data()),
        Mutant("shuffled batches, the last dropped", "accounted as Poisson", poisson, batches(shuffled)),
        Mutant("batches of fixed size", "accounted as Poisson", poisson, batches(fixed_size)),
        Mutant("batches with replacement", "accounted as Poisson", poisson, batches(with_replacement)),
        Mutant("sampling at 2q", "q is charged", poisson, batches(at_twice_the_rate)),
        Mutant("the same batch every step", "as a captured graph might", poisson, batches(the_same_every_step)),
        Mutant("examples drawn in pairs", "not independently", poisson, batches(in_pairs)),
        Mutant("an empty batch skipped", "its absence is seen", first_once, empty_skipped()),
        Mutant("an overflowing batch truncated", "what does not fit is lost", "in parts", truncated()),
        Mutant("charged after the release", "a crash hides a release", first_once, charged_late()),
        Mutant("not charged", "ε stays 0", first_once, not_charged()),
        Mutant("charged every other time", "half of ε", first_once, charged_every_other()),
        Mutant("charged at q/2", "wrong q", first_once, charged_as(sample_rate=lambda q: q / 2)),
        Mutant("charged at 2σ", "wrong σ", first_once, charged_as(noise_multiplier=lambda s: 2 * s)),
        Mutant("an accountant that halves ε", "the claim is wrong", "account is no less", too_small_epsilon()),
        Mutant("noise of every rank", "W times as much variance", "sigma c over b", every_rank_adds_noise()),
        Mutant("ranks add the same noise", "shares of it from one seed", width, ranks_share_their_noise()),
        Mutant("every rank noises the sum itself", "W releases, one charge", definition, ranks_noise_apart()),
        Mutant("averaged over ranks", "as ordinary gradients are", definition, averaged_over_ranks()),
        Mutant("other ranks' sums lost", "only the first one's is released", definition, other_ranks_lost()),
        Mutant("ranks add up in bf16", "rounded by more than an example", "coherent", reduced_in_bf16()),
        Mutant("a rank's sum clipped", "not its examples", definition, clipped_after_reduction("rank")),
        Mutant("clipped after the reduction", "the sum, not its examples", definition, clipped_after_reduction("all")),
        Mutant("a θ for every rank", "no gradient of one objective", definition, theta_of_each_rank()),
        Mutant("all of the batch on every rank", "every example W times", poisson, all_of_the_batch_on_every_rank()),
        Mutant("a rank skips its empty part", "its absence is seen, or awaited", first_once, empty_part_skipped()),
        Mutant(
            "only the first rank charges", "ε as another rank states it is 0", first_once, other_ranks_do_not_charge()
        ),
    ]
