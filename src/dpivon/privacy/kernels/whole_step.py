"""One release as one program: θ, the clipped sum of a padded batch and its noise; and the update that follows, as another.

The noise is that of the optimizer's own generator, which moves on with every replay, so no noise is used twice. The program
is launched by :func:`dpivon.privacy.mechanism.release_by`, which has charged for it. Numbers that may change, such as σC, the
divisor and step sizes, are read from the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpivon.optim.rows import Numbers, StateRows, rows_of
from dpivon.optim.tensors import TensorList
from dpivon.privacy.kernels.padded_step import PaddedStep
from dpivon.privacy.kernels.replay import Replay
from dpivon.privacy.mechanism import Mechanism, NoiseSpec, OneProcess, as_release, noised
from dpivon.privacy.noise import TorchNoise
from dpivon.privacy.precision import compiled, without_autocast
from dpivon.release import LearnsFromReleases, Release

if TYPE_CHECKING:
    from dpivon.privacy.optimizer import DPOptimizer

_LARGEST = 2**24  # weights of which noise is drawn at once; larger models do not wait for Python


class WholeStep:
    """The program of one release on a padded batch, and the optimizer's update from it where that can be captured.

    Args:
        program: the clipped sum, which has run before.
        optimizer: whose release it is.
        generator: what draws its noise.
    """

    def __init__(self, program: PaddedStep, optimizer: DPOptimizer, generator: torch.Generator) -> None:
        self.program, self.optimizer, self.generator = program, optimizer, generator
        self.params: list[Tensor] = optimizer.params
        device, inner = program.device, optimizer.original_optimizer
        self.rows: StateRows | None = rows_of(inner, lambda function: compiled(function, device))
        samples = 0 if self.rows is None else self.rows.samples
        self._thetas = [[torch.empty_like(p, requires_grad=False) for p in self.params] for _ in range(samples)]
        self._numbers = Numbers(2, device)
        self.released = torch.zeros(sum(program.sizes), device=device)
        self.gradients = TensorList.of(self.released, [p.shape for p in self.params]).tensors
        self.loss = torch.zeros((), device=device)
        self.prepared = False
        self._made: Release | None = None  # the last one
        drawing = [generator, *([g] if (g := getattr(inner, "generator", None)) is not None else [])]
        self._release = Replay(self._run, device, program.replay, drawing)
        self._update = Replay(self._learn, device, None, drawing[1:])

    def prepare(self) -> None:
        """Compile and capture it, once it is ready; nothing is released, and no draw is used up."""
        if self.prepared:
            return
        self._rehearse()
        self._release.capture()
        if self.rows is not None:
            self._update.capture()
        self.prepared = True

    @torch.no_grad()
    def _rehearse(self) -> None:
        """Compute all parts once beside the run: on its weights, with other draws and no sum, and put everything back."""
        device, inner = self.program.device, self.optimizer.original_optimizer
        groups = [] if self.rows is None else self.rows.groups
        kept = [*self.params, *(t for group in groups for t in (*group.rows.values(), group.t))]
        before, given = [t.clone() for t in kept], getattr(inner, "generator", None)
        forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
        try:
            with forked, without_autocast(device.type):
                like = torch.randn(self.released.shape, dtype=torch.float64, device=device)
                noised(like, like, *self._numbers)
                if self.rows is not None:
                    inner.generator = None  # type: ignore[attr-defined]
                    self.rows.draw(self._thetas)
                    self.rows.step(torch.zeros_like(self.released))
        finally:
            if self.rows is not None:
                inner.generator = given  # type: ignore[attr-defined]
            for t, value in zip(kept, before, strict=True):
                t.copy_(value)

    def ready(self, spec: NoiseSpec) -> bool:
        """Whether the next release can be made by this program; the optimizer's state is then in place."""
        journal, noise = self.optimizer.journal, self.optimizer.noise
        if (
            type(spec.mechanism) is not Mechanism
            or spec.noise_std == 0
            or noise_on(noise, self.program.device) is not self.generator
            or (journal is not None and journal.reads_sums)
        ):
            return False
        # Of a sum no batch size is stated, and rules go by their own.
        return self.rows is None or (spec.loss_reduction == "mean" and self.rows.ready(spec.divisor, spec.variance))

    def __call__(self, spec: NoiseSpec) -> Release:
        self._numbers.write((spec.noise_std, spec.divisor))
        self._release()
        if self.rows is not None:
            self.optimizer.original_optimizer.replayed = self._replayed  # type: ignore[attr-defined]
        self._made = as_release(dict(zip(self.params, self.gradients, strict=True)), spec)
        return self._made

    @torch.no_grad()
    def _run(self) -> None:
        if self.rows is not None:
            with without_autocast(self.program.device.type):
                self.rows.draw(self._thetas)
        sums, loss = self.program.at(self._thetas or self.program.thetas)
        parts = TensorList(sums.split_with_sizes(self.program.sizes))
        like = TensorList([t.view(p.shape) for t, p in zip(parts, self.params, strict=True)])
        drawn = like.filled(self._standard_normal)
        normal = torch.cat([t.reshape(-1) for t in drawn]) if drawn.flat is None else drawn.flat
        self.released.copy_(noised(sums, normal, *self._numbers))
        self.loss.copy_(loss)

    def _standard_normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=self.generator)

    @torch.no_grad()
    def _learn(self) -> None:
        assert self.rows is not None
        with without_autocast(self.program.device.type):
            self.rows.step(self.released)

    def _replayed(self, release: Release) -> bool:
        if release is not self._made:
            return False
        assert self.rows is not None
        self._update()
        self.rows.count()
        return True


def noise_on(noise: Any, device: torch.device) -> torch.Generator | None:
    """What draws the noise there; None if it is not torch's own generator, as it is."""
    return noise._on(device) if type(noise) is TorchNoise and "normal" not in vars(noise) else None


def whole_step(program: PaddedStep, optimizer: DPOptimizer) -> WholeStep | None:
    """The program of a whole release with this sum; None if releases of this optimizer are not such that one can make them."""
    generator, params = noise_on(optimizer.noise, program.device), optimizer.params
    fits = all(p.dtype == torch.float32 for p in params) and sum(program.sizes) <= _LARGEST
    if generator is None or type(optimizer.together) is not OneProcess or not fits:
        return None
    made = WholeStep(program, optimizer, generator)
    return None if made.rows is None and isinstance(optimizer.original_optimizer, LearnsFromReleases) else made
