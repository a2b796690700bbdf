"""Opacus's per-example gradient collectors, with what silently breaks in them mended.

- Convolutions fed channels_last tensors get contiguous ones: Opacus unfolds by stride and would be silently wrong.
- An empty batch is replaced by one dummy example whose output is cut off again, so that every layer and every mode
  can run it. Its gradient is exactly zero, and the release with its noise still happens.
- State left behind by an interrupted pass can be cleared (:func:`clear_pass`); Opacus would add it to the next one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks, GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from opacus.grad_sample.gsm_exp_weights import GradSampleModuleExpandedWeights
from opacus.utils.module_utils import has_trainable_params
from torch import Tensor, nn

from dpivon.errors import PrivacyError, bad


class _ContiguousCapture:
    """Hand Opacus's layer rules contiguous tensors only."""

    def capture_activations_hook(self, module: nn.Module, forward_input: Any, forward_output: Any) -> None:
        inputs = [t.contiguous() if isinstance(t, Tensor) else t for t in forward_input]
        super().capture_activations_hook(module, inputs, forward_output)  # type: ignore[misc]

    def capture_backprops_hook(
        self, module: nn.Module, forward_input: Any, forward_output: Any, **options: Any
    ) -> None:
        grads = tuple(t.contiguous() if isinstance(t, Tensor) else t for t in forward_output)
        try:
            super().capture_backprops_hook(module, forward_input, grads, **options)  # type: ignore[misc]
        except RuntimeError as error:
            raise PrivacyError(
                f"The per-example gradients of a {type(module).__name__} could not be formed ({' '.join(str(error).split())}). "
                "Let every layer's input have the batch where batch_first says, or use grad_sample_mode='bookkeeping'."
            ) from error


class _EmptyBatch:
    """Run an empty batch as one dummy example that nothing downstream sees."""

    batch_first: bool
    dummy_rows: int = 1  # one example's worth: as many as it has augmentations

    def _fill(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The inputs with dummy rows, or None if the batch is not empty."""
        dim = 0 if self.batch_first else 1
        if not any(t.dim() > dim and t.shape[dim] == 0 for t in tensors_in((args, kwargs))):
            return None
        filled: tuple[Any, Any] = _map(lambda t: _with_rows(t, dim, self.dummy_rows), (args, kwargs))
        return filled

    def _cut(self, output: Any) -> Any:
        dim = 0 if self.batch_first else 1
        return _map(lambda t: t.narrow(dim, 0, 0) if t.dim() > dim else t, output)


class EmptyBatchInForward(_EmptyBatch):
    """For a wrapping module: around its own forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        filled = self._fill(args, kwargs)
        if filled is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return self._cut(super().forward(*filled[0], **filled[1]))  # type: ignore[misc]


class EmptyBatchInHooks(_EmptyBatch):
    """For a model that is not wrapped: in forward hooks on it.

    A model that is itself a single layer is left alone: its own backward hook would see the output after it was cut.
    """

    _was_empty = False

    def __init__(self, m: nn.Module, **options: Any) -> None:
        super().__init__(m, **options)  # type: ignore[call-arg]
        self.attach(m)

    def attach(self, m: nn.Module) -> None:
        if not has_trainable_params(m):
            # First of all: whoever counts rows must count those of the filled batch.
            m.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
            m.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        filled = self._fill(args, kwargs)
        self._was_empty = filled is not None
        return filled

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._cut(output) if self._was_empty else output


class _DoubleNorms:
    """Ghost norms in double precision.

    ‖AᵀG‖² = ⟨AAᵀ, GGᵀ⟩ cancels when activations share a large offset: in fp32 it can come out too small, and the example
    would then be clipped too little.
    """

    @property
    def NORM_SAMPLERS(self) -> dict[type, Callable[..., Any]]:
        samplers = GradSampleHooksFastGradientClipping.NORM_SAMPLERS
        return {layer: _in_double(sampler) for layer, sampler in samplers.items()}


class HooksModule(EmptyBatchInForward, _ContiguousCapture, GradSampleModule):  # type: ignore[misc]
    """Modes ``"hooks"`` and ``"functorch"``."""


class ExpandedWeightsModule(EmptyBatchInForward, GradSampleModuleExpandedWeights):  # type: ignore[misc]
    """Mode ``"ew"``."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x.contiguous(), *args, **kwargs)


class GhostModule(EmptyBatchInForward, _DoubleNorms, _ContiguousCapture, GradSampleModuleFastGradientClipping):  # type: ignore[misc]
    """Mode ``"ghost"``."""


class Hooks(EmptyBatchInHooks, _ContiguousCapture, GradSampleHooks):  # type: ignore[misc]
    """Modes ``"hooks"`` and ``"functorch"`` on a model that is not to be wrapped."""


class GhostHooks(EmptyBatchInHooks, _DoubleNorms, _ContiguousCapture, GradSampleHooksFastGradientClipping):  # type: ignore[misc]
    """Mode ``"ghost"`` on a model that is not to be wrapped."""


Collector = HooksModule | ExpandedWeightsModule | GhostModule | Hooks | GhostHooks

MODES = ("hooks", "functorch", "ew", "ghost")


def collect(
    module: nn.Module, grad_sample_mode: str, *, batch_first: bool, loss_reduction: str, wrap_model: bool
) -> Collector:
    """Attach the collector of a mode: a wrapping module, or bare hooks if ``wrap_model`` is False."""
    makers: dict[tuple[str, bool], Callable[..., Collector]] = {
        ("hooks", True): HooksModule,
        ("hooks", False): Hooks,
        ("functorch", True): HooksModule,
        ("functorch", False): Hooks,
        ("ew", True): ExpandedWeightsModule,
        ("ghost", True): GhostModule,
        ("ghost", False): GhostHooks,
    }
    options: dict[str, Any] = {"batch_first": batch_first, "loss_reduction": loss_reduction}
    if grad_sample_mode == "functorch":
        options["force_functorch"] = True
    maker = makers.get((grad_sample_mode, wrap_model))
    if maker is None:
        known = ", ".join(map(repr, MODES))
        if grad_sample_mode in MODES:
            raise bad("wrap_model", wrap_model, f"is not possible with {grad_sample_mode!r}", "Use wrap_model=True")
        raise bad("grad_sample_mode", grad_sample_mode, f"is not one of {known}", "Use 'hooks'")
    if grad_sample_mode == "ew" and not batch_first:
        raise bad("batch_first", batch_first, "is not possible with grad_sample_mode='ew'", "Use 'hooks'")
    # torch warns of the first layer's backward hook at every step; it fires as intended.
    warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
    return maker(module, **options)


def clear_pass(module: nn.Module) -> None:
    """Forget every half-finished forward or backward pass."""
    for layer in module.modules():
        for attribute in ("activations", "max_batch_len"):
            if attribute in layer.__dict__:
                delattr(layer, attribute)
    for p in module.parameters():
        if hasattr(p, "_current_grad_sample"):
            del p._current_grad_sample
        if hasattr(p, "_forward_counter"):
            p._forward_counter = 0


def _in_double(sampler: Callable[..., Any]) -> Callable[..., Any]:
    def double_sampler(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> Any:
        return sampler(layer, [_double(a) for a in activations], backprops.double())

    return double_sampler


def _double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in tensors_in(v)]
    if isinstance(value, tuple | list):
        return [t for v in value for t in tensors_in(v)]
    return []


def _map(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        return {k: _map(fn, v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        mapped = [_map(fn, v) for v in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    return value


def _with_rows(t: Tensor, dim: int, rows: int) -> Tensor:
    if t.dim() <= dim or t.shape[dim] != 0:
        return t
    shape = list(t.shape)
    shape[dim] = rows
    return torch.zeros(shape, dtype=t.dtype, device=t.device)
