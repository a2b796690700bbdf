"""Parameters that a model uses in its own code, through ``F.linear`` or ``F.embedding``, observed as those of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpivon.privacy.layers.linear import embedding, linear
from dpivon.privacy.layers.uses import Use
from dpivon.privacy.precision import as_multiplied, wide

#: Observes z, of which the gradient becomes uses; ``saved`` must not change until then.
Observer = Callable[[Tensor, Callable[[Tensor], Mapping[Tensor, Use]], list[Tensor]], Tensor]


class Functions(TorchFunctionMode):
    """Inside, trainable parameters of a module are observed where they are a weight of ``F.linear`` or ``F.embedding``."""

    def __init__(self, module: nn.Module, observe: Observer, expand: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._own = {id(p) for p in module.parameters()}
        self._observe, self._expand = observe, expand

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _FUNCTIONS.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        return rule(self, *args, **(kwargs or {}))

    def _watches(self, p: Tensor | None) -> bool:
        return p is not None and p.requires_grad and id(p) in self._own  # while its layer runs it is detached

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self._watches(weight) or (bias is not None and bias.requires_grad and not self._watches(bias)):
            return F.linear(input, weight, bias)
        layer, x = SimpleNamespace(weight=weight, bias=bias), as_multiplied(self._expand(input))
        z = F.linear(x, weight.detach(), None if bias is None else bias.detach())
        return self._observe(z, lambda g: linear(layer, (x.detach(),), g), [x.detach()])

    def _embedding(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        if not self._watches(weight):
            return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        at = padding_idx if padding_idx is None or padding_idx >= 0 else len(weight) + padding_idx
        layer: Any = SimpleNamespace(weight=weight, padding_idx=at, scale_grad_by_freq=scale_grad_by_freq)
        index = self._expand(input)
        z = F.embedding(index, weight.detach(), padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return self._observe(z, lambda g: embedding(layer, (index,), wide(g)), [index])


_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {F.linear: Functions._linear, F.embedding: Functions._embedding}
