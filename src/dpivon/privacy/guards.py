"""What must hold of model, optimizer and data before and while they are trained privately."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer as OpacusDPOptimizer
from opacus.validators.errors import UnsupportedModuleError
from opacus.validators.module_validator import ModuleValidator
from torch import Tensor, nn
from torch.optim import Optimizer

from dpivon.errors import ArgumentError, PrivacyError, bad
from dpivon.optim.ivon import IVON
from dpivon.privacy.gradients.collect import tensors_in
from dpivon.privacy.losses import LossWatch


def check_model(module: nn.Module, grad_sample_mode: str) -> None:
    """A model whose per-example gradients mean something."""
    if isinstance(module, AbstractGradSampleModule) or hasattr(module, "autograd_grad_sample_hooks"):
        raise bad("module", type(module).__name__, "is already private", "Pass the plain module, and only once")
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not trainable:
        raise bad("module", type(module).__name__, "has no trainable parameters", "Set requires_grad on some")
    for name, p in trainable:
        if p.dtype == torch.float16:
            raise bad(
                f"module.{name}",
                p.dtype,
                "sums of clipped gradients lose the guarantee in fp16",
                "Use module.float() and, for speed, bf16 autocast",
            )
    devices = sorted({str(p.device) for _, p in trainable})
    if len(devices) > 1:
        raise bad("module", devices, "has parameters on several devices", "Move it with module.to(device)")
    for name, layer in module.named_modules():
        mixes = layer.training or not getattr(layer, "track_running_stats", True)
        # Opacus looks at trainable layers only, and would let one with affine=False pass.
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and mixes:
            raise UnsupportedModelError(
                f"module.{name}={type(layer).__name__}: normalises over the batch, so one example changes all gradients. "
                "Use GroupNorm; PrivacyEngine.get_compatible_module(module) replaces it."
            )
    problems = ModuleValidator.validate(module, strict=False)
    if grad_sample_mode == "bookkeeping":  # it has a rule for the attention that Opacus asks to be replaced
        problems = [p for p in problems if "nn.MultiheadAttention" not in str(p)]
    if problems:
        raise UnsupportedModelError(
            f"module={type(module).__name__}: {str(problems[0]).rstrip('. ')}. "
            "PrivacyEngine.get_compatible_module(module) replaces what can be replaced."
        )


def check_optimizer(module: nn.Module, optimizer: Optimizer) -> None:
    """An optimizer of this model's parameters that learns only from what the boundary hands it."""
    if isinstance(optimizer, OpacusDPOptimizer):
        raise bad(
            "optimizer",
            type(optimizer).__name__,
            "is already private",
            "Pass the plain optimizer, and only once",
        )
    if hasattr(optimizer, "sampled_params") and not isinstance(optimizer, IVON):
        raise bad(
            "optimizer",
            f"{type(optimizer).__module__}.{type(optimizer).__name__}",
            "captures raw gradients on leaving sampled_params, before they are clipped and noised",
            "Use dpivon.IVON",
        )
    names = {p: name for name, p in module.named_parameters()}
    optimised = set(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    strangers = [p for p in optimised if p not in names]
    if strangers:
        raise bad(
            "optimizer",
            f"{len(strangers)} parameter(s), the first of shape {tuple(strangers[0].shape)}",
            "Module parameters are different than optimizer Parameters",
            "Make the optimizer from module.parameters(), after the module was fixed or moved",
        )
    left_out = [name for p, name in names.items() if p.requires_grad and p not in optimised]
    if left_out:
        raise bad(
            "optimizer",
            f"without {left_out[0]!r}",
            f"{len(left_out)} trainable parameter(s) of the module are not in it",
            "Add them, or freeze them with requires_grad_(False)",
        )


class UnsupportedModelError(ArgumentError, UnsupportedModuleError):  # type: ignore[misc]
    """A model that cannot be trained privately; also Opacus's error of that meaning."""


class ForwardWatch:
    """Looks at every training forward: which batch it saw, whether it changed a buffer or a frozen parameter, and by which
    loss its gradient comes back.

    These are neither clipped nor noised, so a forward that writes to one (running statistics, counters) would carry
    data around the mechanism. Writes through ``.data`` leave no trace in torch, so the first forward compares values as well.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.batch: list[Tensor] = []
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        self._before_forward: dict[str, tuple[Tensor, int, Tensor | None]] = {}
        self._first = True
        self._changed: list[str] = []
        self._losses = LossWatch()
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not module.training:
            return
        if torch.is_grad_enabled():
            self.batch = tensors_in((args, kwargs))
        buffers = {name: (b, b._version, b.clone() if self._first else None) for name, b in _buffers(module).items()}
        frozen = {name: (p, p._version, None) for name, p in self._frozen.items()}
        self._before_forward, self._first = buffers | frozen, False

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._before_forward:
            now = _buffers(module) | self._frozen
            for name, (tensor, version, value) in self._before_forward.items():
                same = now.get(name) is tensor and tensor._version == version
                if not same or (value is not None and not _bits_equal(value, tensor)):
                    self._changed.append(name)
            self._before_forward = {}
        if module.training and torch.is_grad_enabled():
            self._losses.watch(output)

    def check_buffers(self) -> None:
        changed, self._changed = self._changed, []
        if changed:
            raise PrivacyError(
                f"Buffer {changed[0]!r} was changed by forward: it would carry private data around the mechanism. "
                "Remove the running statistics, or compute them from public data and freeze them."
            )

    def same_batch(self, earlier: list[Tensor]) -> bool:
        """Whether the last forward saw bit for bit the same tensors as an earlier one."""
        return len(earlier) == len(self.batch) and all(
            a is b or _bits_equal(a, b) for a, b in zip(earlier, self.batch, strict=True)
        )


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """``dict(module.named_buffers())``; if there are none, which most models for private training have, after a quick walk."""
    walk, seen = [module], {module}
    for layer in walk:
        if layer._buffers:
            return dict(module.named_buffers())
        new = [child for child in layer._modules.values() if child is not None and child not in seen]
        seen.update(new)
        walk += new
    return {}


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # As bytes: a NaN equals itself here, or a bad record would show as an error.
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dim() else bool(a == b)
