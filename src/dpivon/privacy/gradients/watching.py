"""Every layer of a model is watched: its weights are detached while it runs, and its output is observed.

What becomes of an output's gradient is the book-keeper's: :mod:`dpivon.privacy.gradients.bookkeeping`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from opacus.layers.dp_rnn import DPRNNBase
from opacus.utils.module_utils import has_trainable_params
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dpivon.errors import PrivacyError
from dpivon.privacy.layers.fallback import opacus_rule
from dpivon.privacy.layers.registry import Rule, forward_for, plain_type, rule_for, takes_bf16
from dpivon.privacy.layers.uses import Dense, Use
from dpivon.privacy.precision import as_multiplied, wide

Uses = Callable[[Tensor], Mapping[Tensor, Use]]
#: Layers that do nothing with their input but multiply it.
_PRODUCTS = {nn.Linear, NonDynamicallyQuantizableLinear, nn.Conv1d, nn.Conv2d, nn.Conv3d}


class LayerWatch:
    """What :class:`~dpivon.privacy.gradients.bookkeeping.BookKeeper` is made on: hooks on the layers, put on and taken off."""

    def __init__(
        self, module: nn.Module, *, batch_first: bool, scatter: Callable[[Tensor, Tensor], Tensor] | None
    ) -> None:
        self.module = module
        self.batch_first = batch_first
        self.rows: int | None = None  # of the batch, as the model saw it
        self._scatter = scatter  # of a sharded model: from the sum of a whole parameter to the part that is kept here
        self._handles: list[Any] = []
        self._patched: list[nn.Module] = []
        self._detached: list[list[Tensor]] = []
        self._owners = {layer: dict(layer.named_parameters()) for layer in module.modules()} if scatter else {}

    def _observe(self, z: Tensor, uses: Uses, saved: Sequence[Any] = (), *, batch_major: bool = False) -> Tensor:
        """Arrange that the gradient of z becomes uses when backward reaches it. ``saved`` must not change until then."""
        raise NotImplementedError

    def _attach_to_model(self) -> None:
        self.module.autograd_grad_sample_hooks = self._handles  # type: ignore[assignment]  # Opacus's mark of a private model
        try:
            self._watch(self.module)
        except BaseException:
            self.detach_from_model()
            raise

    def detach_from_model(self) -> None:
        if hasattr(self.module, "autograd_grad_sample_hooks"):
            del self.module.autograd_grad_sample_hooks
        for handle in self._handles:
            handle.remove()
        for layer in self._patched:
            del layer.forward

    def _watch(self, module: nn.Module) -> None:
        if not any(p.requires_grad for p in module.parameters()):
            return
        forward, rule = forward_for(module), rule_for(module)
        if forward is not None and (rule is None or self.batch_first):  # a forward puts the batch first
            self._replace_forward(module, forward)
        elif rule is not None:
            self._hook(module, rule)
        elif has_trainable_params(module) and not isinstance(module, DPRNNBase):
            bare = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
            if all(p.dim() > 1 and p.shape[0] == 1 for p in bare.values()):
                self._expand_bare(module, bare)
                for child in module.children():
                    self._watch(child)
            else:
                self._hook(module, opacus_rule(module))
        else:
            for child in module.children():
                self._watch(child)

    def _hook(self, layer: nn.Module, rule: Rule) -> None:
        in_precision, multiplies = _precision_for(layer), plain_type(layer) in _PRODUCTS

        def before(layer: nn.Module, args: Any) -> Any:
            self._detached.append(self._detach(layer) if self._recording(layer) else [])
            rounds = multiplies and self._detached[-1] and args and isinstance(args[0], Tensor)
            return (as_multiplied(args[0]), *args[1:]) if rounds else None

        def after(layer: nn.Module, args: Any, output: Any) -> Any:
            weights = self._detached.pop()
            for p in weights:
                p.requires_grad = True
            if not weights or output is None:
                return output
            if not isinstance(output, Tensor):
                raise PrivacyError(
                    f"{type(layer).__name__} returned a {type(output).__name__}: book-keeping needs one tensor. "
                    "Use grad_sample_mode='functorch', or register a rule for the layer."
                )
            if any(output is t for t in args):
                output = output.view_as(output)  # else a gradient of the input's other uses would count as this layer's
            inputs = tuple(t.detach() if isinstance(t, Tensor) else t for t in args)
            uses = in_precision(lambda g: rule(layer, self._batch_major(inputs), g))
            return self._observe(output, self._of_owner(layer, uses), inputs)

        self._handles.append(layer.register_forward_pre_hook(before))
        self._handles.append(
            layer.register_forward_hook(after, always_call=True, prepend=True)
        )  # before a hook changes z

    def _replace_forward(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        original: Any = layer.forward
        in_precision = _precision_for(layer)
        own = getattr(original, "__self__", None) is layer

        def watched(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._recording(layer):
                # Of the layer that is called: a deep copy has this function too, and weights of its own.
                return original.__func__(layer, *args, **kwargs) if own else original(*args, **kwargs)
            # Attention says itself where its batch is, and always observes with the batch first.
            saved = [t.detach() for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]

            def observe(z: Tensor, uses: Uses) -> Tensor:
                return self._observe(z, self._of_owner(layer, in_precision(uses)), saved, batch_major=True)

            return forward(layer, observe, *args, **kwargs)

        layer.forward = types.MethodType(watched, layer)
        self._patched.append(layer)

    def _expand_bare(self, module: nn.Module, bare: dict[str, nn.Parameter]) -> None:
        """A bare parameter of shape [1, …] is shared along the batch: give every example its own copy, and see its gradient."""

        def before(module: nn.Module, args: Any) -> None:
            if self._recording(module) and self.rows is not None:
                for name, p in bare.items():
                    value = module._parameters[name]  # p itself, or what a functional call put in its place
                    assert value is not None
                    copies = value.detach().expand(self.rows, *p.shape[1:])
                    module.__dict__[name] = self._observe(copies, _whole(value), batch_major=True)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            for name in bare:
                module.__dict__.pop(name, None)

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _of_owner(self, layer: nn.Module, uses: Uses) -> Uses:
        """The uses of a sharded layer under the parameters that the optimizer holds, not the whole ones of this pass."""
        if self._scatter is None:
            return uses
        owners = self._owners[layer]

        def renamed(g: Tensor) -> Mapping[Tensor, Use]:
            names: dict[Tensor, str] = {p: name for name, p in layer.named_parameters()}
            return {owners[names[p]]: use for p, use in uses(g).items()}

        return renamed

    def _recording(self, layer: nn.Module) -> bool:
        return layer.training and torch.is_grad_enabled()

    def _detach(self, layer: nn.Module) -> list[Tensor]:
        # Of a layer without children its own are all of them, and known without a walk.
        own = layer.parameters() if layer._modules else layer._parameters.values()
        weights: list[Tensor] = []
        for p in own:
            if p is not None and p.requires_grad:
                p.requires_grad = False
                weights.append(p)
        return weights

    def _batch_major(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.batch_first:
            return tensors
        return tuple(t.transpose(0, 1) if isinstance(t, Tensor) and t.dim() > 1 else t for t in tensors)


def has_rules(module: nn.Module) -> bool:
    """Whether every trainable layer has a rule of ours, so that book-keeping needs no fallback."""
    if not any(p.requires_grad for p in module.parameters()):
        return True
    if forward_for(module) is not None or rule_for(module) is not None:
        return True
    bare = [p for p in module.parameters(recurse=False) if p.requires_grad and not isinstance(module, DPRNNBase)]
    return all(p.dim() > 1 and p.shape[0] == 1 for p in bare) and all(has_rules(child) for child in module.children())


def _whole(p: Tensor) -> Uses:
    """The gradient of an example's own copy of p is its per-example gradient."""
    return lambda g: {p: Dense(wide(g).unsqueeze(1))}


def _precision_for(layer: nn.Module) -> Callable[[Uses], Uses]:
    """How uses are given their gradients: in fp32 or better, unless the layer's rule asks for bf16 as it comes."""
    return (lambda uses: uses) if takes_bf16(layer) else (lambda uses: lambda g: uses(wide(g)))
