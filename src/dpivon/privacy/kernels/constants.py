"""Values that a recorded program may look at: those that follow from shapes alone, and so are the same for every batch.

A stock language model asks whether its positions, an ``arange``, belong to several texts, and leaves out the mask if they do
not. The answer is fixed by the shapes. One that depends on data, weights or draws is refused: a record would keep the answer
of one batch, and so private data, for all others. Models that look at data for speed or for a warning do not where torch
compiles them, which :func:`as_compiled` tells them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: These read memory without an operation that could be recorded.
_PAST_OPERATIONS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}


class ReadsValues(RuntimeError):
    """A program that is recorded looks at values that depend on data."""

    def __init__(self, func: Any) -> None:
        super().__init__(f"its forward reads data-dependent values ({getattr(func, '__name__', func)})")


class LooksAtConstants(TorchDispatchMode):
    """While a program is recorded, lets it read numbers that no input of it has part in, and no others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and _constant(args[0]):
            with disable_proxy_modes_tracing():
                return func(*args)
        if torch.Tag.dynamic_output_shape in func.tags and _shape_of_values(func, args, kwargs):
            raise ReadsValues(func)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if torch.Tag.data_dependent_output in func.tags:
                raise ReadsValues(func) from error
            raise


class LooksPastOperations(TorchFunctionMode):
    """The same of methods that copy values out of a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PAST_OPERATIONS and not _constant(args[0]):
            raise ReadsValues(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def as_compiled(on: bool = True) -> Iterator[None]:
    """Inside, if on, ``torch.compiler.is_compiling()`` is true for models, and for torch itself what it was: modules of torch
    would leave out hooks that the book-keeper needs after an error."""
    original = torch.compiler.is_compiling

    def answer() -> bool:
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return original() or not f"{asks}.".startswith("torch.")

    torch.compiler.is_compiling = answer if on else original
    try:
        yield
    finally:
        torch.compiler.is_compiling = original


def _shape_of_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the shape of the result depends on values, so that a GPU would be waited for: not with indices in numbers."""
    if func is torch.ops.aten.index.Tensor:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return kwargs.get("output_size") is None


def _constant(t: Tensor) -> bool:
    mode = get_proxy_mode()
    made: Any = None if mode is None else get_proxy_slot(t, mode.tracer, None)
    node = getattr(getattr(made, "proxy", None), "node", None)
    return isinstance(node, Node) and follows_from_shapes(node)


def follows_from_shapes(node: Node) -> bool:
    """Whether a recorded value is made of constants only: of no input and no draw, and nothing that shares memory with what it
    is made of was written to."""
    made_of, waiting = {node}, [node]
    while waiting:
        for other in waiting.pop().all_input_nodes:
            if other not in made_of:
                made_of.add(other)
                waiting.append(other)
    if not all(map(_pure, made_of)):
        return False
    shared, waiting = set(made_of), list(made_of)
    while waiting:
        for user in waiting.pop().users:
            if not isinstance(user.target, torch._ops.OpOverload) or user.target._schema.is_mutable:
                return False
            if user not in shared:
                shared.add(user)
                waiting.append(user)
    return True


def _pure(node: Node) -> bool:
    func = node.target
    if node.op != "call_function" or not isinstance(func, torch._ops.OpOverload):
        return False
    return not func._schema.is_mutable and torch.Tag.nondeterministic_seeded not in func.tags
