"""Nested state (dictionaries, lists, numbers, tensors) as JSON and named tensors, and back. No pickle, so no code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dpivon.errors import bad

_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"


def flatten(value: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` with every tensor moved to ``tensors`` and replaced by its name: something JSON can hold."""
    if isinstance(value, Tensor):
        tensors[prefix] = value.detach()
        return {_TENSOR: prefix}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: flatten(v, f"{prefix}.{key}", tensors) for key, v in value.items()}
        pairs = [[flatten(k, prefix, tensors), flatten(v, f"{prefix}.{k}", tensors)] for k, v in value.items()]
        return {_PAIRS: pairs}
    if isinstance(value, list | tuple):
        items = [flatten(v, f"{prefix}.{i}", tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise bad(
        prefix, type(value).__name__, "cannot be kept without pickle", "Keep numbers, texts, lists and tensors only"
    )


def unflatten(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`flatten`."""
    if isinstance(value, list):
        return [unflatten(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]].clone(memory_format=torch.contiguous_format)
    if _TUPLE in value:
        return tuple(unflatten(v, tensors) for v in value[_TUPLE])
    if _PAIRS in value:
        return {unflatten(k, tensors): unflatten(v, tensors) for k, v in value[_PAIRS]}
    return {key: unflatten(v, tensors) for key, v in value.items()}
