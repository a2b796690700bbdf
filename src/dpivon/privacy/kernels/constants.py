"""Values that a recorded program may look at: those that follow from shapes alone, and so are the same for every batch.

A stock language model asks whether its positions, an ``arange``, belong to several texts, and leaves out the mask if they do
not. The answer is fixed by the shapes. One that depends on data, weights or draws is refused, as it was before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import TorchDispatchMode


class LooksAtConstants(TorchDispatchMode):
    """While a program is recorded, lets it read numbers that no input of it has part in."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and _constant(args[0]):
            with disable_proxy_modes_tracing():
                return func(*args)
        return func(*args, **(kwargs or {}))


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
