"""Layer rules: from what a layer saw and the gradient of what it said to the uses of its parameters.

A rule is a function ``rule(layer, inputs, g) -> {parameter: use}``: ``inputs`` are the layer's positional inputs, ``g`` is the
gradient of its output, both with one example a row; ``g`` is that example's own loss gradient, in fp32 or better (with
``bf16=True`` also in bf16, for a rule that adds up in fp32 by itself). Register one for your own layer with
:func:`register_rule`:

>>> @register_rule(MyScale)
... def my_scale(layer, inputs, g):
...     return {layer.scale: Dense((g * inputs[0]).sum(1))}

A layer that computes several things inside (attention) gets a forward of its own with :func:`register_forward`, which
hands every intermediate output to ``observe(z, uses)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from dpivon.privacy.layers.projected import projected
from dpivon.privacy.layers.summed import summed
from dpivon.privacy.layers.uses import Use

Rule = Callable[[Any, tuple[Any, ...], Tensor], Mapping[Tensor, Use]]
Observe = Callable[[Tensor, Callable[[Tensor], Mapping[Tensor, Use]]], Tensor]
Forward = Callable[..., Any]

RULES: dict[type[nn.Module], Rule] = {}
FORWARDS: dict[type[nn.Module], Forward] = {}
TAKE_BF16: set[type[nn.Module]] = set()
_F = TypeVar("_F", bound=Callable[..., Any])


def register_rule(*layers: type[nn.Module], bf16: bool = False) -> Callable[[_F], _F]:
    """Make the decorated function the rule of these layer types.

    Args:
        *layers: exactly these: a subclass may compute something else.
        bf16: whether the rule takes gradients in bf16 and adds them up in fp32 by itself.
    """

    def add(rule: _F) -> _F:
        RULES.update(dict.fromkeys(layers, rule))
        _note_precision(layers, bf16)
        return rule

    return add


def register_forward(*layers: type[nn.Module], bf16: bool = False) -> Callable[[_F], _F]:
    """Make the decorated ``forward(layer, observe, *args, **kwargs)`` the training forward of these layer types.

    Args:
        *layers: exactly these.
        bf16: whether its uses take gradients in bf16 and add them up in fp32 by themselves.
    """

    def add(forward: _F) -> _F:
        FORWARDS.update(dict.fromkeys(layers, forward))
        _note_precision(layers, bf16)
        return forward

    return add


def _note_precision(layers: tuple[type[nn.Module], ...], bf16: bool) -> None:
    if bf16:
        TAKE_BF16.update(layers)
    else:
        TAKE_BF16.difference_update(layers)


def plain_type(layer: nn.Module) -> type[nn.Module]:
    """The class of a layer as its author wrote it: ``fully_shard`` puts one of its own in front."""
    kind = type(layer)
    if len(kind.__bases__) == 2 and kind.__bases__[0].__name__ == "FSDPModule":
        inner: type[nn.Module] = kind.__bases__[1]
        return inner
    return kind


def takes_bf16(layer: nn.Module) -> bool:
    return plain_type(layer) in TAKE_BF16


def rule_for(layer: nn.Module) -> Rule | None:
    if type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers."):
        return hugging_face_conv1d
    return RULES.get(plain_type(layer))


def forward_for(layer: nn.Module) -> Forward | None:
    return FORWARDS.get(plain_type(layer))


def hugging_face_conv1d(layer: Any, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    """z = x W + b, a linear layer with its weight stored the other way round."""
    uses: dict[Tensor, Use] = {}
    g = g.reshape(len(g), -1, g.shape[-1])
    if layer.weight.requires_grad:
        a = inputs[0].to(g.dtype).reshape(len(g), -1, inputs[0].shape[-1])
        uses[layer.weight] = projected(a, g, layer.weight.shape, transposed=True)
    if layer.bias.requires_grad:
        uses[layer.bias] = summed(g, uses.get(layer.weight))
    return uses
