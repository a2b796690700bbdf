"""DPOptimizer: clip, sum, release; then hand g_dp to any optimizer."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from opacus.optimizers import DPOptimizer as OpacusDPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor, nn
from torch.optim import Optimizer

from dpivon.errors import ArgumentError, PrivacyError, bad
from dpivon.optim.ivon import IVON
from dpivon.optim.metric import FactoredMetric
from dpivon.optim.releases import HasPosterior, LearnsFromReleases
from dpivon.optim.tensors import TensorList
from dpivon.posterior import Posterior
from dpivon.privacy.clipping import Clipping
from dpivon.privacy.gradients.base import GradientSource
from dpivon.privacy.guards import ForwardWatch
from dpivon.privacy.metric import Scaling
from dpivon.privacy.noise import NoiseSource, SecureNoise
from dpivon.privacy.precision import full_precision
from dpivon.privacy.ranks.together import Alone, Decision, Together
from dpivon.privacy.sampling import Draws
from dpivon.privacy.spec import NoiseSpec
from dpivon.release import Release
from dpivon.shards import like_parameter, local

_METRIC = "dpivon_metric"


class Journal(Protocol):
    """Who decides, after a resume, what a release is: a new one, or one that was made before the crash."""

    def decide(self, sums: Mapping[Tensor, Tensor], spec: NoiseSpec) -> Decision:
        """What this sum is to become. One rank decides for all."""
        ...

    def charge_for(self, decision: Decision) -> Callable[[NoiseSpec], None] | None:
        """How to charge what was decided; None to drop it unreleased."""
        ...


class DPOptimizer(OpacusDPOptimizer):  # type: ignore[misc]
    """An optimizer that learns from released gradients only. Made by ``dpivon.PrivacyEngine``.

    It stands where Opacus's ``DPOptimizer`` stands and answers to the same names (``noise_multiplier``,
    ``max_grad_norm``, ``expected_batch_size``, ``accumulated_iterations``, ``signal_skip_step``, step hooks), so
    schedulers and memory managers work on it. After ``step()`` each ``p.grad`` is the released g_dp.
    """

    _step_supports_amp_scaling = True  # so that GradScaler announces itself, and can be refused

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        spec: NoiseSpec,
        clipping: Clipping,
        source: GradientSource,
        noise: NoiseSource,
        charge: Callable[[NoiseSpec], None],
        module: nn.Module,
        watch: ForwardWatch,
        draws: Draws | None,
        prefetches: bool = False,
        together: Together | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        self.original_optimizer = optimizer
        self._init_optimizer_protocol()
        self._spec, self._clipping = spec, clipping
        self.first_spec = spec
        self.journal: Journal | None = None
        self.source, self.noise, self.charge = source, noise, charge
        self.module, self.watch, self.draws = module, watch, draws
        self._prefetches = prefetches
        self.together: Together = together or Alone()
        self._scaling = scaling
        self.secure_mode = isinstance(noise, SecureNoise)
        self.step_hooks: list[Callable[[DPOptimizer], None]] = []
        self.last_release: Release | None = None
        self._open_spec: NoiseSpec | None = None  # the spec of the logical batch that is being summed
        self._micro_batch_is_last: bool | None = None
        self._micro_batch_is_summed = False
        self._first_sample_batch: list[Tensor] = []
        self._step_skip_queue: list[bool] = []
        self._is_last_step_skipped = False
        self._in_closure = False
        for p in self.params:
            p.summed_grad = None
        self._bind_inner()
        if draws is not None:
            draws.listeners.append(weakref.ref(self))

    def _init_optimizer_protocol(self) -> None:
        """What ``torch.optim.Optimizer.__init__`` sets up besides state and groups, which belong to the inner optimizer."""
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_state_dict_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_state_dict_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_load_state_dict_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._patch_step_function()

    def _bind_inner(self) -> None:
        """The inner optimizer may step from here only: elsewhere ``p.grad`` is raw."""
        if isinstance(self.original_optimizer, LearnsFromReleases):
            self.original_optimizer.bind_to_releases()
        elif hasattr(self.original_optimizer, "_optimizer_step_pre_hooks"):
            self.original_optimizer.register_step_pre_hook(_refuse_unreleased_step)

    # ---- the spec, under Opacus's names

    @property
    def spec(self) -> NoiseSpec:
        """What the next release will be. Immutable; the setters below replace it."""
        return self._spec

    @property
    def noise_multiplier(self) -> float:
        """σ of the next release; setting it replaces the spec."""
        return self._spec.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self._spec = self._spec.replace(noise_multiplier=value)

    @property
    def max_grad_norm(self) -> float:
        """C of the next release; setting it replaces the spec, and the clipping with it."""
        return self._spec.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self._spec = self._spec.replace(max_grad_norm=value)
        self._clipping = self._clipping.rescaled(self._spec.max_grad_norm)

    @property
    def clipping(self) -> Clipping:
        """How examples are bounded."""
        return self._clipping

    @property
    def metric(self) -> FactoredMetric | None:
        """What examples are stretched by before they are clipped, if anything."""
        return None if self._scaling is None else self._scaling.metric

    @property
    def expected_batch_size(self) -> float:
        """b, what a mean is divided by."""
        return self._spec.expected_batch_size

    @property
    def loss_reduction(self) -> str:
        """``"mean"`` or ``"sum"``."""
        return self._spec.loss_reduction

    @property
    def generator(self) -> torch.Generator | None:
        """Where the noise comes from; None in secure mode. Its state is a secret."""
        generator: torch.Generator | None = getattr(self.noise, "generator", None)
        return generator

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
        return self.source.batches(self.params)

    # ---- sampling θ

    @contextmanager
    def sampled_params(self, train: bool = False) -> Iterator[None]:
        """As :meth:`dpivon.IVON.sampled_params`. Gradients taken inside with ``train=True`` stay on this side of the
        boundary until ``step()``; with ``mc_samples=K`` they are averaged per example before clipping."""
        inner = self._variational()
        self.together.settle(self.module)
        if train and self._in_closure and inner.inside_training_sample:  # step(closure) has sampled already
            yield
            return
        if not train:
            with inner.sampled_params():
                yield
            return
        k = inner.mc_samples
        if inner.samples_used >= k and not inner.inside_training_sample:
            raise PrivacyError(
                f"sampled_params(train=True) entered {inner.samples_used + 1} times in one step but mc_samples={k}: each "
                "further pass would be clipped again. Make the optimizer with mc_samples set to the number of passes, and "
                "call step() after them."
            )
        if k > 1:
            self.source.begin_sample(self.params)
        try:
            with inner.sampled_params(train=True):
                yield
            if k > 1:
                self._check_same_batch(first=inner.samples_used == 1)
        except BaseException:
            self._forget_pending_passes()
            raise
        self.source.end_of_sample(self.params, k)

    def _check_same_batch(self, *, first: bool) -> None:
        if first:
            self._first_sample_batch = self.watch.batch
        elif not self.watch.same_batch(self._first_sample_batch):
            raise PrivacyError(
                "The θ-samples of one step saw different batches: an example in two of them would be clipped twice. Use one "
                "batch for all of a step's samples; for augmentations pass augmentations=M to make_private."
            )

    def _variational(self) -> IVON:
        if not isinstance(self.original_optimizer, IVON):
            name = type(self.original_optimizer).__name__
            raise ArgumentError(f"optimizer={name}: has no posterior to sample from. Make it private with dpivon.IVON.")
        return self.original_optimizer

    def posterior(self, model: nn.Module | None = None) -> Any:
        """The trained posterior, under the model's own names; a point of zero width for an ordinary optimizer."""
        model = self.module if model is None else model
        self.together.settle(self.module)
        if isinstance(self.original_optimizer, HasPosterior):
            return self.original_optimizer.posterior(model)
        return Posterior.point(model)

    # ---- the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip and sum what backward left; unless more micro-batches follow, release it and update."""
        if getattr(self, "found_inf", None) is not None or getattr(self, "grad_scale", None) is not None:
            raise PrivacyError(
                "GradScaler: gradients would be clipped while multiplied by its scale. Train in bf16 autocast without a scaler."
            )
        loss = None if closure is None else self._run(closure)
        if self.pre_step():
            if isinstance(self.original_optimizer, LearnsFromReleases):
                self.original_optimizer.step(release=self.last_release)
            else:
                self.original_optimizer._stepping_on_release = True  # type: ignore[attr-defined]
                try:
                    self.original_optimizer.step()
                finally:
                    self.original_optimizer._stepping_on_release = False  # type: ignore[attr-defined]
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
        self._check_samples_complete()
        self.watch.check_buffers()
        if self._open_spec is not None and self._open_spec != self._spec:
            raise PrivacyError(
                "noise_multiplier or max_grad_norm changed in the middle of a logical batch: part of the sum was clipped to "
                "another bound. Step schedulers between logical batches."
            )
        self._check_micro_batch_is_new()
        spec = self._spec.replace(accumulated=self.accumulated_iterations, drawn_by=self.drawn_by)
        self._open_spec = self._spec
        self.clip_and_accumulate()
        self._micro_batch_is_summed = True
        self.source.forget_passes()
        if self._check_skip_next_step():
            self._is_last_step_skipped = True
            if isinstance(self.original_optimizer, IVON):
                self.original_optimizer.rewind_samples()
            return False
        return self._release(spec)

    def clip_and_accumulate(self) -> None:
        # Without autocast, which would take the sum in bf16 if the caller's step() is inside one.
        with full_precision(), torch.autocast(self.params[0].device.type, enabled=False):
            metric = () if self._scaling is None else (self._scaling.factors(self.params),)
            sums = self.source.clipped_sums(self.params, self._clipping, *metric)
        for p in self.params:
            if p.summed_grad is not None:
                _check_processed_flag(p.summed_grad)
        # All or nothing: after an error half-way, a retry would count the batch twice in some of the parameters.
        held = [p.summed_grad for p in self.params]
        if any(h is None for h in held):
            new = [s if h is None else h + s for h, s in zip(held, sums, strict=True)]
        else:
            new = (TensorList(held) + TensorList(sums)).tensors
        for p, total in zip(self.params, new, strict=True):
            p.summed_grad = total

    def _release(self, spec: NoiseSpec) -> bool:
        for p in self.params:
            _check_processed_flag(p.summed_grad)
        if self.draws is not None:
            self.draws.redeem()
        sums = {p: p.summed_grad for p in self.params}
        made = self.together.release(self, sums, spec)
        if made is None:  # a step that was to repeat a lost one, and does not
            self.abandon_virtual_batch()
            return False
        if self._scaling is not None:
            made = self._scaling.unscaled(made)
            self._scaling.learn(made)
        self.last_release = made
        self._open_spec = None
        self._is_last_step_skipped = False
        for group in self.original_optimizer.param_groups:
            for p in group["params"]:
                p.grad = None  # also of a parameter that was frozen after backward
        released = TensorList([_shaped(made.gradients[p], local(p)) for p in self.params])
        for p, g in zip(self.params, released.copied([p.dtype for p in self.params]), strict=True):
            _mark_as_processed(p.summed_grad)
            p.grad = like_parameter(g, p)
        for hook in self.step_hooks:
            hook(self)
        return True

    def _check_micro_batch_is_new(self) -> None:
        announced = bool(self._step_skip_queue)
        if self._micro_batch_is_last is not None:
            repeated = self._micro_batch_is_summed
        else:
            repeated = self.draws is not None and self._is_last_step_skipped and not announced
        if repeated:
            raise PrivacyError(
                "step() twice on one micro-batch: its examples would be clipped twice in one release. Take the next "
                "micro-batch from the BatchMemoryManager before every step()."
            )

    def _check_samples_complete(self) -> None:
        if not isinstance(self.original_optimizer, IVON):
            return
        used, k = self.original_optimizer.samples_used, self.original_optimizer.mc_samples
        if 0 < used < k:
            raise PrivacyError(
                f"step() after {used} of mc_samples={k} passes: enter sampled_params(train=True) {k} times before step()."
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; the clipped sum of an unfinished logical batch, and its θ, stay."""
        inner = self.original_optimizer
        if isinstance(inner, IVON) and inner.samples_complete:
            self.source.begin_sample(self.params)  # between two θ-samples of one step: keep what the first one gave
        else:
            self.source.clear(self.params)
            if isinstance(inner, IVON) and not inner.inside_training_sample and not self._is_last_step_skipped:
                inner.discard_samples()
        if not self._is_last_step_skipped:
            self._open_spec = None
            for p in self.params:
                p.summed_grad = None
        inner.zero_grad(set_to_none)

    # ---- logical batches made of micro-batches

    def begin_micro_batch(self, *, first: bool, last: bool) -> None:
        """Announce the next micro-batch (``dpivon.BatchMemoryManager`` does)."""
        if first:
            self.abandon_virtual_batch()
            if self.draws is not None:
                self.draws.redeemable = True
        self._micro_batch_is_last, self._micro_batch_is_summed = last, False

    def signal_skip_step(self, do_skip: bool = True) -> None:
        if self.draws is not None and self._prefetches:
            raise PrivacyError(
                "Opacus's BatchMemoryManager with data-loader workers: its flags run ahead of the batches, and after an error "
                "one example could enter a release twice. Use dpivon.BatchMemoryManager."
            )
        self._step_skip_queue.append(do_skip)

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        if self._micro_batch_is_last is not None:
            return not self._micro_batch_is_last
        return bool(super()._check_skip_next_step(pop_next))

    def next_batch_drawn(self) -> None:
        """The sampler drew a logical batch; unless it runs ahead, that is the one that comes next."""
        if not self._prefetches:
            self.abandon_virtual_batch()

    def next_batch_delivered(self) -> None:
        """The loader hands out a logical batch: whatever is still pending belongs to one that failed."""
        self.abandon_virtual_batch()

    def abandon_virtual_batch(self) -> None:
        """Drop what is left of a logical batch that will not be completed. Nothing of it was released."""
        self._micro_batch_is_last = None
        self._step_skip_queue.clear()
        self._forget_pending_passes()
        if self._is_last_step_skipped or self._open_spec is not None:  # the latter after a release that failed
            self._is_last_step_skipped = False
            self.zero_grad()

    def _forget_pending_passes(self) -> None:
        self.source.forget_passes()
        if isinstance(self.original_optimizer, IVON) and self.original_optimizer.samples_used:
            self.source.clear(self.params)
            self.original_optimizer.rewind_samples()

    # ---- the optimizer protocol

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and what the metric has learned."""
        state: dict[str, Any] = super().state_dict()
        return state if self._scaling is None else {**state, _METRIC: self._scaling.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if (_METRIC in state_dict) != (self._scaling is not None):
            fix = "Call make_private with the metric that the run was begun with, or without one if it had none"
            raise bad("metric", self.metric, "is not that of the state", fix)
        if self._scaling is not None:
            if self._open_spec is not None:
                raise PrivacyError(
                    "load_state_dict in the middle of a logical batch: its examples were clipped in another metric. Load "
                    "between two of them."
                )
            self._scaling.check(state_dict[_METRIC])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != _METRIC})
        if self._scaling is not None:
            self._scaling.load_state_dict(state_dict[_METRIC])

    @property
    def step_hook(self) -> Callable[[DPOptimizer], None] | None:
        """The hook attached last, as Opacus has it."""
        return self.step_hooks[-1] if self.step_hooks else None

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """Call ``fn(optimizer)`` after every release. Hooks add up; accounting is not among them and cannot be displaced."""
        self.step_hooks.append(fn)

    def add_noise(self) -> None:
        raise PrivacyError("add_noise() by itself would release without a charge. Call step().")

    def scale_grad(self) -> None:
        raise PrivacyError("scale_grad() by itself would change a release after its noise. Call step().")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise PrivacyError(
            "add_param_group on a private optimizer: its clipping bound and noise cover the parameters it was made with. "
            "Add the group before make_private."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DPOptimizer:
        """A copy of model and optimizer state that shares the noise stream, the batches and the accountant."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        memo[id(self.charge)] = self.charge
        # Not `step`, which a learning-rate scheduler may have replaced by one bound to the original.
        own = {key: value for key, value in self.__dict__.items() if key != "step"}
        new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in own.items()})
        new.charge = self.charge
        new._bind_inner()
        for p in new.params:  # torch copies a parameter without its attributes
            p.grad_sample, p.summed_grad, p._forward_counter = None, None, 0
        if new.draws is not None:
            new.draws.listeners.append(weakref.ref(new))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PrivacyError(
            "pickle of a private optimizer: two processes would add the same noise and charge apart. "
            "Save optimizer.state_dict() instead."
        )


def _shaped(g: Tensor, p: Tensor) -> Tensor:
    return g if g.shape == p.shape else g.view_as(p)


def _refuse_unreleased_step(inner: Optimizer, args: Any, kwargs: Any) -> None:
    if not getattr(inner, "_stepping_on_release", False):
        raise PrivacyError(
            f"step() on the inner {type(inner).__name__}: p.grad holds raw gradients. Call step() on the optimizer that "
            "make_private returned."
        )
