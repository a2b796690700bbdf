"""Layer rules: from a layer's inputs and its output's gradient to the uses of its parameters.

A rule is a function ``rule(layer, inputs, g) -> {parameter: use}``: ``inputs`` are the layer's positional inputs, ``g`` is the
gradient of its output, both with one example per row. ``g`` is in fp32 or better; with ``bf16=True`` also in bf16, for a rule
that adds up in fp32 by itself. Register one for your own layer with :func:`register_rule`:

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

from dpivon.privacy.layers.uses import Use

Rule = Callable[[Any, tuple[Any, ...], Tensor], Mapping[Tensor, Use]]
Observe = Callable[[Tensor, Callable[[Tensor], Mapping[Tensor, Use]]], Tensor]
Forward = Callable[..., Any]

#: A layer of a package that need not be installed is known by name, "package.Class".
Kind = type[nn.Module] | str
RULES: dict[Kind, Rule] = {}
FORWARDS: dict[Kind, Forward] = {}
TAKE_BF16: set[Kind] = set()
_F = TypeVar("_F", bound=Callable[..., Any])


def register_rule(*layers: Kind, bf16: bool = False) -> Callable[[_F], _F]:
    """Make the decorated function the rule of these layer types.

    Args:
        *layers: exactly these: a subclass may compute something else.
        bf16: whether the rule takes gradients in bf16 and adds them up in fp32 by itself.
    """

    return _register(RULES, layers, bf16)


def register_forward(*layers: Kind, bf16: bool = False) -> Callable[[_F], _F]:
    """Make the decorated ``forward(layer, observe, *args, **kwargs)`` the training forward of these layer types.

    Args:
        *layers: exactly these.
        bf16: whether its uses take gradients in bf16 and add them up in fp32 by themselves.
    """

    return _register(FORWARDS, layers, bf16)


def _register(registry: dict[Kind, Any], layers: tuple[Kind, ...], bf16: bool) -> Callable[[_F], _F]:
    def add(function: _F) -> _F:
        registry.update(dict.fromkeys(layers, function))
        (TAKE_BF16.update if bf16 else TAKE_BF16.difference_update)(layers)
        return function

    return add


def plain_type(layer: nn.Module) -> type[nn.Module]:
    """The class of a layer as its author wrote it: ``fully_shard`` puts one of its own in front."""
    kind = type(layer)
    if len(kind.__bases__) == 2 and kind.__bases__[0].__name__ == "FSDPModule":
        inner: type[nn.Module] = kind.__bases__[1]
        return inner
    return kind


def by_name(layer: nn.Module) -> str:
    kind = plain_type(layer)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def takes_bf16(layer: nn.Module) -> bool:
    return plain_type(layer) in TAKE_BF16 or by_name(layer) in TAKE_BF16


def rule_for(layer: nn.Module) -> Rule | None:
    return RULES.get(by_name(layer)) or RULES.get(plain_type(layer))


def forward_for(layer: nn.Module) -> Forward | None:
    return FORWARDS.get(plain_type(layer))
