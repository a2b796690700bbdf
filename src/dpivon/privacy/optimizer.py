"""DPOptimizer: clip, sum, release; then hand g_dp to any optimizer."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from dpivon.errors import PrivacyError, PrivacyWarning
from dpivon.optim.ivon import IVON
from dpivon.posterior import Posterior
from dpivon.privacy.clipping import Clipping
from dpivon.privacy.forward_watch import IGNORED_LABELS, ForwardWatch
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.logical_batch import (
    LogicalBatch,
    ThetaPasses,
    add_sums,
    drop_sums,
    hand_over,
    unreleased_sums,
    variational,
)
from dpivon.privacy.mechanism import NEW, NoiseSpec, OneProcess, ReleaseProgram, charge_for, release_by
from dpivon.privacy.noise import NoiseSource
from dpivon.privacy.opacus_names import OpacusNames
from dpivon.privacy.precision import full_precision, without_autocast
from dpivon.privacy.sampling import Draws
from dpivon.release import HasPosterior, LearnsFromReleases, Release

if TYPE_CHECKING:
    from dpivon.privacy.resume import ReplayJournal


class DPOptimizer(OpacusNames):
    """An optimizer that learns from released gradients only. Made by ``dpivon.PrivacyEngine``.

    It stands where Opacus's ``DPOptimizer`` stands and answers to the same names (``noise_multiplier``,
    ``max_grad_norm``, ``expected_batch_size``, ``accumulated_iterations``, ``signal_skip_step``, step hooks), so
    schedulers and memory managers work on it. After ``step()`` each ``p.grad`` is the released g_dp.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        spec: NoiseSpec,
        clipping: Clipping,
        source: BookKeeper,
        noise: NoiseSource,
        charge: Callable[[NoiseSpec], None],
        module: nn.Module,
        watch: ForwardWatch,
        draws: Draws | None,
        prefetches: bool = False,
        together: OneProcess | None = None,
    ) -> None:
        super().__init__(optimizer, spec=spec, clipping=clipping, noise=noise)
        self.first_spec, self.first_clipping = spec, clipping
        self.journal: ReplayJournal | None = None
        self.source, self.charge = source, charge
        self.module, self.watch, self.draws = module, watch, draws
        self._prefetches = prefetches
        self.together = together or OneProcess()
        self.last_release: Release | None = None
        self.loss_checked = False  # by engine.check, on made-up numbers
        self.breaks_with_ignored = False  # and found to depend on how many labels of a batch are -100
        if draws is not None:
            watch.losses.ignored = lambda: draws.ignored
        self._told_of_loss = False
        self._batch = LogicalBatch()
        self._passes = ThetaPasses(source, watch)
        self._in_closure = False
        self._program: ReleaseProgram | None = None  # what makes the release of the step at hand, if not this
        self._known_spec: tuple[tuple[NoiseSpec, int, tuple[str, str]], NoiseSpec] | None = None
        drop_sums(self.original_optimizer)
        self._connect()

    def _connect(self) -> None:
        """The inner optimizer learns from here only, and the sampler says when a batch is drawn."""
        _bind(self.original_optimizer)
        if self.draws is not None:
            self.draws.listeners.append(weakref.ref(self))

    # ---- what others ask

    @property
    def drawn_by(self) -> tuple[str, str]:
        """Where noise and batches come from, for the ledger."""
        sampler = None if self.draws is None else self.draws.sampler()
        return getattr(self.noise, "origin", "unstated"), "not ours" if sampler is None else sampler.origin

    @property
    def sampler_generator(self) -> torch.Generator | None:
        """What draws the batches; None in secure mode, and without Poisson sampling."""
        sampler = None if self.draws is None else self.draws.sampler()
        return None if sampler is None or sampler.secure else sampler.generator

    @property
    def batch_number(self) -> int:
        """How many batches were handed out; 0 where workers draw them ahead, or the caller does."""
        sampler = None if self.draws is None or self._prefetches else self.draws.sampler()
        return 0 if sampler is None else sampler.passes * sampler.steps + sampler.position

    @property
    def accumulated_iterations(self) -> int:
        """How many batches the pending gradients come from."""
        return self.source.batches()

    def posterior(self, model: nn.Module | None = None) -> Any:
        """The trained posterior, under the model's own names; a point of zero width for an ordinary optimizer."""
        model = self.module if model is None else model
        self.together.settle(self.module)
        if isinstance(self.original_optimizer, HasPosterior):
            return self.original_optimizer.posterior(model)
        return Posterior.point(model)

    # ---- sampling θ

    @contextmanager
    def sampled_params(self, train: bool = False) -> Iterator[None]:
        """As :meth:`dpivon.IVON.sampled_params`. Gradients taken inside with ``train=True`` stay on this side of the
        boundary until ``step()``; with ``mc_samples=K`` they are averaged per example before clipping."""
        ivon = variational(self.original_optimizer)
        self.together.settle(self.module)
        if train and self._in_closure and ivon.inside_training_sample:  # step(closure) has sampled already
            yield
            return
        with self._passes.sample(ivon) if train else ivon.sampled_params():
            yield

    # ---- the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip and sum what backward left; unless more micro-batches follow, release it and update."""
        if getattr(self, "found_inf", None) is not None or getattr(self, "grad_scale", None) is not None:
            raise PrivacyError(
                "GradScaler: gradients would be clipped while multiplied by its scale. Train in bf16 autocast without a scaler."
            )
        loss = None if closure is None else self._run(closure)
        if self.pre_step():
            _step_on(self.original_optimizer, self.last_release)
            self.together.stepped(self)
        return loss

    def _run(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            if not isinstance(self.original_optimizer, IVON):
                return closure()
            losses = []
            self._in_closure = True
            try:
                for _ in range(self.original_optimizer.mc_samples):
                    with self.sampled_params(train=True):
                        losses.append(closure())
            finally:
                self._in_closure = False
            return sum(losses[1:], start=losses[0]) / len(losses)

    def pre_step(self, closure: Callable[[], Any] | None = None) -> bool:
        """Everything before the inner optimizer's step. False while a logical batch is still incomplete."""
        self._passes.check_complete(self.original_optimizer)
        self.watch.check_tensors()
        self._tell_of_unchecked_loss()
        if self.breaks_with_ignored and self.draws is not None and self.draws.ignored:
            raise PrivacyError(IGNORED_LABELS)
        self._batch.check(self._spec, drawn=self.draws is not None)
        spec = self.spec_of_release()
        self._batch.spec = self._spec
        if self._program is not None:
            self._batch.is_summed = True
            self.source.forget_passes()
            return self._release(spec, self._program)
        if not self._check_skip_next_step(pop_next=False):
            self.last_release = None  # its memory is that of the next
        self.clip_and_accumulate()
        self._batch.is_summed = True
        self.source.forget_passes()
        if self._check_skip_next_step():
            self._batch.goes_on = True
            self._passes.rewind(self.original_optimizer)
            return False
        return self._release(spec)

    def _tell_of_unchecked_loss(self) -> None:
        """Say once that nothing shows that every example has a loss of its own."""
        if self._told_of_loss or self.loss_checked or self.watch.losses.checked:
            return
        self._told_of_loss = True
        warnings.warn(
            "The loss was not checked: if one example changes the loss of another, clipping does not bound it. Call "
            "engine.check(loss_fn) after make_private, or use dpivon.PerExampleLoss.",
            PrivacyWarning,
            stacklevel=4,
        )

    def spec_of_release(self) -> NoiseSpec:
        """The spec with what is known now: that of the last release, which was checked, unless something has changed."""
        known = (self._spec, self.accumulated_iterations, self.drawn_by)
        if self._known_spec is None or self._known_spec[0] != known:
            self._known_spec = known, self._spec.replace(accumulated=known[1], drawn_by=known[2])
        return self._known_spec[1]

    def clip_and_accumulate(self) -> None:
        params = self.params
        with full_precision(), without_autocast(params[0].device.type):
            clipped = self.source.clipped_sums(params, self._clipping)
        add_sums(params, clipped)

    def step_by(self, program: ReleaseProgram) -> None:
        """One step whose release a program makes, of a whole batch; nothing of the batch is pending here."""
        redeemable = self.draws is not None and self.draws.redeemable
        self.begin_micro_batch(first=True, last=True)
        if self.draws is not None:
            self.draws.redeemable = redeemable  # a batch that was released before stays released
        self._passes.clear(self.original_optimizer, keep_theta=False)
        drop_sums(self.original_optimizer)
        self._program = program
        try:
            self.step()
        finally:
            self._program = None

    def _release(self, spec: NoiseSpec, program: ReleaseProgram | None = None) -> bool:
        """Charge and noise the sum, once; False if it was dropped instead."""
        params = self.params
        total = unreleased_sums(params) if program is None else {}
        if self.draws is not None:
            self.draws.redeem()
        if program is None:
            made = self.together.release(self, total, spec)
        else:
            charge = charge_for(self, (NEW, ""))
            assert charge is not None
            made = release_by(program, spec, charge)
        if made is None:  # a step that was to repeat a lost one, and does not
            self.abandon_virtual_batch()
            return False
        self.last_release = made
        self._batch.end()
        hand_over(made, params, self.original_optimizer, by_program=program is not None)
        for hook in self.step_hooks:
            hook(self)
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; the clipped sum of an unfinished logical batch, and its θ, stay."""
        self._passes.clear(self.original_optimizer, keep_theta=self._batch.goes_on)
        if not self._batch.goes_on:
            self._batch.spec = None
            drop_sums(self.original_optimizer)
        for p in () if set_to_none else self.params:
            p.grad = (
                None if p.grad is None else torch.zeros_like(p.grad)
            )  # not in the release, which has the same memory
        self.original_optimizer.zero_grad(set_to_none)

    # ---- logical batches made of micro-batches

    def begin_micro_batch(self, *, first: bool, last: bool) -> None:
        """Announce the next micro-batch (``dpivon.BatchMemoryManager`` does)."""
        if first:
            self.abandon_virtual_batch()
            if self.draws is not None:
                self.draws.redeemable = True
        self._batch.announce(last=last)

    def signal_skip_step(self, do_skip: bool = True) -> None:
        if self._spec.unit:
            raise PrivacyError(
                "Opacus's BatchMemoryManager with user_ids: it would split a person over two batches, and clip them twice. "
                "Use dpivon.BatchMemoryManager."
            )
        if self.draws is not None and self._prefetches:
            raise PrivacyError(
                "Opacus's BatchMemoryManager with data-loader workers: its flags run ahead of the batches, and after an error "
                "one example could enter a release twice. Use dpivon.BatchMemoryManager."
            )
        self._batch.flags.append(do_skip)

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        return self._batch.more_follow(take=pop_next)

    @property
    def _is_last_step_skipped(self) -> bool:
        """Opacus's name for a logical batch that goes on."""
        return self._batch.goes_on

    def next_batch_drawn(self) -> None:
        """The sampler drew a logical batch; unless it runs ahead, that is the one that comes next."""
        if not self._prefetches:
            self.abandon_virtual_batch()

    def next_batch_delivered(self) -> None:
        """The loader hands out a logical batch: whatever is still pending belongs to one that failed."""
        self.abandon_virtual_batch()

    def abandon_virtual_batch(self) -> None:
        """Drop what is left of a logical batch that will not be completed. Nothing of it was released."""
        begun = self._batch.abandon()
        self._passes.forget(self.original_optimizer)
        if begun:
            self.zero_grad()

    # ---- state and copies

    def __deepcopy__(self, memo: dict[int, Any]) -> DPOptimizer:
        """A copy of model and optimizer state that shares the noise stream, the batches and the accountant."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        memo[id(self.charge)] = self.charge
        # Not `step`, which a learning-rate scheduler may have replaced by one bound to the original.
        own = {key: value for key, value in self.__dict__.items() if key != "step"}
        new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in own.items()})
        new.charge = self.charge
        for p in new.params:  # torch copies a parameter without its attributes
            p.grad_sample, p.summed_grad, p._forward_counter = None, None, 0
        new._connect()
        return new


def _bind(inner: Optimizer) -> None:
    """From now on a step that is not :func:`_step_on`'s is an error."""
    if isinstance(inner, LearnsFromReleases):
        inner.bind_to_releases()
    elif hasattr(inner, "_optimizer_step_pre_hooks"):
        inner.register_step_pre_hook(_refuse_unreleased_step)


def _step_on(inner: Optimizer, release: Release | None) -> None:
    """Let it learn from the release, or from ``p.grad``, which holds it."""
    if isinstance(inner, LearnsFromReleases):
        inner.step(release=release)
        return
    inner._stepping_on_release = True  # type: ignore[attr-defined]
    try:
        inner.step()
    finally:
        inner._stepping_on_release = False  # type: ignore[attr-defined]


def _refuse_unreleased_step(inner: Optimizer, args: Any, kwargs: Any) -> None:
    if not getattr(inner, "_stepping_on_release", False):
        raise PrivacyError(
            f"step() on the inner {type(inner).__name__}: p.grad holds raw gradients. Call step() on the optimizer that "
            "make_private returned."
        )
