"""Clipped sums by ghost clipping: one backward for the norms, a second one for the weighted sum.

Opacus packages the two passes in a criterion whose loss has its own ``backward``. This one differs in that the bound C
is read from the optimizer at every pass (Opacus keeps a copy that schedulers miss), and in that an example with a
non-finite gradient is taken out of the second pass instead of turning every parameter into NaN.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping, DPTensorFastGradientClipping
from torch import Tensor, nn

from dpivon.errors import PrivacyError, bad
from dpivon.optim.metric import Factors
from dpivon.privacy.clipping import Clipping, FlatClipping
from dpivon.privacy.gradients.collect import GhostHooks, GhostModule, clear_pass
from dpivon.privacy.losses import check_criterion
from dpivon.privacy.precision import full_precision


class GhostGradients:
    """The source side: after :meth:`GhostLoss.backward`, ``p.grad`` holds the clipped sum."""

    augmentations = 1

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.ready = False
        self._written: dict[Tensor, tuple[Tensor | None, int]] = {}

    def written(self, params: Sequence[Tensor]) -> None:
        """The clipped sum is in ``p.grad``. Whatever touches it from now on has not been clipped."""
        self._written = {p: (p.grad, 0 if p.grad is None else p.grad._version) for p in params}
        self.ready = True

    def clipped_sums(
        self, params: Sequence[Tensor], clipping: Clipping, metric: Sequence[Factors] | None = None
    ) -> list[Tensor]:
        assert metric is None, "make_private refuses a metric in ghost mode"
        if not self.ready:
            raise PrivacyError(
                "step() without a ghost-clipped backward: compute the loss with the criterion that make_private returned "
                "and call loss.backward() once before step()."
            )
        self.ready = False
        for p in params:
            grad, version = self._written.get(p, (None, 0))
            if p.grad is not grad or (grad is not None and grad._version != version):
                raise PrivacyError(
                    f"The gradient of a parameter of shape {tuple(p.shape)} changed after the ghost-clipped backward: a second "
                    "loss would be released without clipping. Add the losses of make_private's criterion instead."
                )
        return [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in params]

    def end_of_sample(self, params: Sequence[Tensor], samples: int) -> None:
        pass

    def begin_sample(self, params: Sequence[Tensor]) -> None:
        pass

    def batches(self, params: Sequence[Tensor]) -> int:
        return 1

    def clear(self, params: Sequence[Tensor]) -> None:
        self.ready = False

    def forget_passes(self) -> None:
        clear_pass(self.module)


class _MaskedGraph:
    """Saved tensors of a forward pass, from which examples can be struck out before a second backward.

    Once an example's loss is dropped its gradient rows are zero, but zero times a saved NaN is NaN; so its saved rows are
    replaced too, by ½: 0/0 would be NaN again. Weights are shared by all examples and stay as they are.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.struck: Tensor | None = None
        self._weights = {p.untyped_storage().data_ptr() for p in params}

    def record(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @staticmethod
    def _pack(t: Tensor) -> tuple[Tensor, int]:
        return t, t._version

    def _unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        t, version = packed
        if t._version != version:
            raise RuntimeError(
                "a tensor needed for backward was changed in place: call loss.backward() inside the sampled_params block."
            )
        if self.struck is None or not t.is_floating_point() or t.untyped_storage().data_ptr() in self._weights:
            return t
        if t.dim() and len(t) == len(self.struck):
            return t.masked_fill(self.struck.view(-1, *[1] * (t.dim() - 1)), 0.5)
        return torch.nan_to_num(t, nan=0.5, posinf=0.5, neginf=0.5)


class _LayerUses:
    """When each parameter was used by its own layer, in autograd's sequence numbers.

    Norms are known for these uses only. A parameter used elsewhere (an l2 penalty, a tied ``F.linear``) would bring an
    unclipped gradient into the second backward.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._spans: dict[Tensor, list[tuple[int, int]]] = defaultdict(list)
        self._entered: list[int] = []
        for layer in layers:
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_hook(self._leave, always_call=True)

    def _enter(self, layer: nn.Module, args: Any) -> None:
        self._entered.append(_sequence_number())

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        span = (self._entered.pop(), _sequence_number())
        for p in layer.parameters():
            self._spans[p].append(span)

    def clear(self) -> None:
        self._spans.clear()

    def check(self, losses: Tensor, params: Sequence[Tensor]) -> None:
        trained, seen, pending = set(params), set(), [losses.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for following, _ in node.next_functions:
                p = getattr(following, "variable", None)
                if p is None:
                    pending.append(following)
                elif p in trained and not any(a <= node._sequence_nr() < b for a, b in self._spans[p]):
                    raise PrivacyError(
                        f"A parameter of shape {tuple(p.shape)} is used outside its layer's forward, so ghost clipping cannot "
                        "bound that part of its gradient. Use the optimizer's weight_decay for a penalty, and a layer for tied "
                        "weights."
                    )


class GhostCriterion(DPLossFastGradientClipping):  # type: ignore[misc]
    """The user's criterion, returning per-example losses whose ``backward`` clips."""

    def __init__(
        self,
        collector: GhostModule | GhostHooks,
        source: GhostGradients,
        params: Callable[[], Sequence[Tensor]],
        clipping: Callable[[], Clipping],
        criterion: Any,
        loss_reduction: str,
        expected_batch_size: float,
    ) -> None:
        check_criterion(criterion, loss_reduction)
        self.module, self.criterion, self.loss_reduction = collector, criterion, loss_reduction
        self.optimizer = None  # Opacus's slot; the clipping bound comes from `clipping` instead
        if not hasattr(criterion, "reduction"):
            criterion.reduction = loss_reduction
        self._source, self._params, self._clipping = source, params, clipping
        self._expected_batch_size = expected_batch_size
        self._graph = _MaskedGraph(params())
        collector._module.register_forward_pre_hook(self._start_recording)
        self._uses = _LayerUses(collector.iterate_submodules(collector._module))
        collector._module.register_forward_hook(self._stop_recording, always_call=True)
        self._recording: torch.autograd.graph.saved_tensors_hooks | None = None

    def _start_recording(self, module: nn.Module, args: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        device = next(module.parameters()).device.type
        if torch.is_autocast_enabled(device):
            raise PrivacyError(
                "grad_sample_mode='ghost' under autocast: the clipped sum would be rounded below fp32 and one example could "
                "move it by more than C. Use grad_sample_mode='hooks', or leave autocast."
            )
        self._uses.clear()
        self._graph = _MaskedGraph(self._params())
        self._recording = self._graph.record()
        self._recording.__enter__()

    def _stop_recording(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._recording is not None:
            recording, self._recording = self._recording, None
            recording.__exit__()

    def __call__(self, *args: Any, shape: Any = None, **kwargs: Any) -> GhostLoss:
        with self._graph.record():
            per_sample = super().__call__(*args, shape=shape, **kwargs).loss_per_sample
        if per_sample.dim() == 0:
            raise bad(
                "criterion",
                self.criterion,
                "returned a scalar where one loss an example is required",
                "Honour reduction='none' in the criterion",
            )
        if per_sample.dim() > 1:  # several outputs an example: reduce them as the criterion itself would
            each = per_sample.flatten(1)
            per_sample = each.mean(dim=1) if self.loss_reduction == "mean" else each.sum(dim=1)
        return GhostLoss(self, per_sample)

    def backward(self, losses: Tensor) -> None:
        """∇ Σ_i c_i ℓ_i with c_i = min(1, C/‖∇ℓ_i‖): the clipped sum, left in ``p.grad``."""
        params = self._params()
        clipping = self._clipping()
        if not isinstance(clipping, FlatClipping):  # guarded by the engine; ghost norms know no layers
            raise bad("clipping", clipping, "is not possible with grad_sample_mode='ghost'", "Use clipping='flat'")
        if self._source.ready:
            raise PrivacyError(
                "A second backward before step(): every example would be clipped twice in one release. "
                "Call step() after each backward, or use dpivon.BatchMemoryManager."
            )
        for p in params:
            p.grad = None
        if losses.numel() == 0:
            clear_pass(self.module._module)
            self._source.written(params)
            return
        self._uses.check(losses, params)
        for p in params:
            p._norm_sample = None  # type: ignore[attr-defined]
        reduced = losses.mean(dim=0) if self.loss_reduction == "mean" else losses.sum(dim=0)
        with full_precision(), torch.autocast(losses.device.type, enabled=False):
            reduced.backward(retain_graph=True)
            factors = clipping.factors(_norms(params)).select(0, 0) * (
                1.0 - rounding_margin(self._expected_batch_size, losses.dtype)
            )
            factors = factors.to(losses.dtype)
            for p in params:
                p.grad = None
            if losses.shape != factors.shape:
                raise PrivacyError(
                    f"{tuple(losses.shape)} losses for {len(factors)} examples: they cannot be weighted one by one, so nothing "
                    "would be clipped. Let the criterion return one loss an example; for sequences pass shape=(batch, length)."
                )
            struck = factors == 0.0
            self._graph.struck = struck if bool(struck.any()) else None
            self.module.disable_hooks()
            try:
                (factors * losses.masked_fill(struck, 0.0)).sum().backward()
            finally:
                self.module.enable_hooks()
        self._source.written(params)


def rounding_margin(expected_batch_size: float, dtype: torch.dtype) -> float:
    """What autograd's own sum of b clipped gradients may be off by, relative to C, in the losses' precision.

    The other modes add up in double; here the second backward adds, so each example is clipped to a little less than
    C. Public: it depends on the expected batch, not on the drawn one.
    """
    return min(0.5, expected_batch_size * torch.finfo(dtype).eps)


def _sequence_number() -> int:
    """The number that the next node of the autograd graph will get."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def _norms(params: Sequence[Tensor]) -> Tensor:
    """Per-example norms, one row for each parameter that the pass used."""
    norms = []
    for p in params:
        if getattr(p, "_current_grad_sample", None) is not None:
            raise PrivacyError(
                f"A parameter of shape {tuple(p.shape)} is shared by layers of different kinds, so only a part of its norm is "
                "known. Use grad_sample_mode='hooks'."
            )
        norm: Tensor | None = p._norm_sample  # type: ignore[attr-defined]
        if norm is not None:
            norms.append(norm.double())
        elif p.grad is not None:
            raise PrivacyError(
                f"A parameter of shape {tuple(p.shape)} has a gradient but no per-example norm, so it cannot be clipped. "
                "Use it only through its layer, or choose grad_sample_mode='functorch'."
            )
    return torch.stack(norms)


class GhostLoss(DPTensorFastGradientClipping):  # type: ignore[misc]
    """A vector of per-example losses with Opacus's arithmetic, whose ``backward`` leaves the clipped sum."""

    def __init__(self, criterion: GhostCriterion, loss_per_sample: Tensor) -> None:
        super().__init__(criterion.module, None, loss_per_sample, criterion.loss_reduction)
        self._criterion = criterion

    def _like(self, losses: Tensor) -> GhostLoss:
        return GhostLoss(self._criterion, losses)

    def __truediv__(self, other: Any) -> GhostLoss:
        return self._like(self.loss_per_sample / other)

    def __mul__(self, other: Any) -> GhostLoss:
        return self._like(self.loss_per_sample * other)

    def __add__(self, other: Any) -> GhostLoss:
        return self._like(super().__add__(other).loss_per_sample)

    def __sub__(self, other: Any) -> GhostLoss:
        return self._like(super().__sub__(other).loss_per_sample)

    def __rsub__(self, other: Any) -> GhostLoss:
        return self._like(other - self.loss_per_sample)

    def __neg__(self) -> GhostLoss:
        return self._like(-self.loss_per_sample)

    def backward(self) -> None:
        self._criterion.backward(self.loss_per_sample)
