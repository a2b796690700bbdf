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
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: These read memory without an operation that could be recorded.
_PAST_OPERATIONS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
#: The shapes of their results depend on values, though torch does not tag them so.
_UNTAGGED = {torch.ops.aten._pack_padded_sequence, torch.ops.aten._to_sparse}

_is_compiling = torch.compiler.is_compiling
_told, _telling = 0, Lock()  # how many runs are inside `as_compiled`; two of them may overlap in threads


class ReadsValues(RuntimeError):
    """A program that is recorded looks at values that depend on data."""

    def __init__(self, func: Any) -> None:
        super().__init__(f"its forward reads data-dependent values ({getattr(func, '__name__', func)})")


@contextmanager
def constants_alone() -> Iterator[None]:
    """While a program is recorded, lets it read numbers that no input of it has part in, and no others.

    Raises:
        ReadsValues: at such a read, and again at the end: a program that catches the error has gone another way than the one
            that was checked.
    """
    refused: list[ReadsValues] = []
    with _Operations(refused), _PastOperations(refused):
        yield
    if refused:
        raise refused[0]


class _Operations(TorchDispatchMode):
    """Reads by operations."""

    def __init__(self, refused: list[ReadsValues]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refused = refused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and _constant(args[0]):
            with disable_proxy_modes_tracing():
                return func(*args)
        if _shape_of_values(func, args, kwargs):
            raise _noted(self._refused, func)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if torch.Tag.data_dependent_output in func.tags:
                raise _noted(self._refused, func) from error
            raise


class _PastOperations(TorchFunctionMode):
    """Reads by methods that copy values out of a tensor, or share its memory."""

    def __init__(self, refused: list[ReadsValues]) -> None:
        super().__init__()
        self._refused = refused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PAST_OPERATIONS and not (func is Tensor.tolist and _constant(args[0])):
            raise _noted(
                self._refused, func
            )  # also of a constant whose memory is shared: data may be written to it later
        return func(*args, **(kwargs or {}))


def _noted(refused: list[ReadsValues], func: Any) -> ReadsValues:
    refused.append(ReadsValues(func))
    return refused[-1]


@contextmanager
def as_compiled(on: bool = True) -> Iterator[None]:
    """Inside, if on, ``torch.compiler.is_compiling()`` is true for models, and for torch itself what it was: modules of torch
    would leave out hooks that the book-keeper needs after an error. It is so in all threads, since backward has its own."""
    global _told
    if not on:
        yield
        return
    with _telling:
        _told += 1
        torch.compiler.is_compiling = _answer
    try:
        yield
    finally:
        with _telling:
            _told -= 1
            torch.compiler.is_compiling = _answer if _told else _is_compiling


def _answer() -> bool:
    asks = sys._getframe(1).f_globals.get("__name__", "")
    return _is_compiling() or not f"{asks}.".startswith("torch.")


def _shape_of_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the shape of the result depends on values, so that a GPU would be waited for: not with indices in numbers."""
    if func.overloadpacket in _UNTAGGED:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
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
