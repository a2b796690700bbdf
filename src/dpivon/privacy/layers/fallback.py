"""Modules without a rule: every example runs by itself, with its own copy of the module's parameters.

The gradient of an example's copy is its per-example gradient, whatever the module computes: an example never meets another one
inside. It costs B copies of the parameters, and B small forward passes where torch cannot vectorise them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from dpivon.errors import PrivacyError
from dpivon.privacy.gradients.model_io import map_tensors, tensors_in
from dpivon.privacy.layers.registry import Observe
from dpivon.privacy.layers.uses import Dense, Use
from dpivon.privacy.precision import wide

#: Where generation keeps what it has seen: of no use in training, and one for all examples.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


class Alone:
    """The forward of one module, example by example. ``forward`` is its own; ``dim`` is where the batch is."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], dim: int) -> None:
        self._call, self._dim = _Call(module, forward), dim
        self._vectorises = True

    def __call__(self, observe: Observe, rows: int, args: Any, kwargs: Any) -> Any:
        kwargs = {name: None if name in _CACHES else value for name, value in kwargs.items()}
        own = {name: p for name, p in self._call.named_parameters() if p.requires_grad}
        copies = {
            name: observe(p.detach().contiguous().expand(rows, *p.shape), _copies_of(p)) for name, p in own.items()
        }
        given = [t for t in tensors_in((args, kwargs)) if self._per_example(t, rows)]
        returned: list[Any] = []

        def one(parameters: dict[str, Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
            rest = iter(inputs)
            a, k = map_tensors(
                lambda t: next(rest).unsqueeze(self._dim) if self._per_example(t, rows) else t, (args, kwargs)
            )
            returned[:] = [functional_call(self._call, parameters, a, k)]
            return tuple(self._row(t) for t in tensors_in(returned[0]))

        outputs = self._run(one, copies, given, rows)
        rest = iter(outputs)
        return map_tensors(lambda t: next(rest), returned[0])

    def _run(
        self, one: Callable[..., tuple[Tensor, ...]], copies: dict[str, Tensor], given: list[Tensor], rows: int
    ) -> list[Tensor]:
        if self._vectorises:
            try:
                each = vmap(one, in_dims=(0, *[self._dim] * len(given)), randomness="different")(copies, *given)
                return [self._batch(t) for t in each]
            except PrivacyError:
                raise
            except (
                Exception
            ):  # an operation that cannot be vectorised; if the module itself fails, it fails again below
                self._vectorises = False
        parts = [
            one({name: c[i] for name, c in copies.items()}, *(t.select(self._dim, i) for t in given))
            for i in range(rows)
        ]
        return [self._batch(torch.stack(column)) for column in zip(*parts, strict=True)]

    def _per_example(self, t: Tensor, rows: int) -> bool:
        return t.dim() > self._dim and t.shape[self._dim] == rows

    def _row(self, t: Tensor) -> Tensor:
        """One example's output, without the dimension in which it is one of one."""
        return t.squeeze(self._dim) if t.dim() > self._dim and t.shape[self._dim] == 1 else t

    def _batch(self, t: Tensor) -> Tensor:
        return t.movedim(0, self._dim) if self._dim and t.dim() > self._dim else t


class _Call(nn.Module):
    """A module under its own forward, without the hooks on it, which have run for the whole batch."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._own = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(*args, **kwargs)


def _copies_of(p: Tensor) -> Callable[[Tensor], Mapping[Tensor, Use]]:
    return lambda g: {p: Dense(wide(g) if g.dim() > 1 else wide(g).unsqueeze(1))}
