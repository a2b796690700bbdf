"""Lists of tensors that compute like one tensor, through PyTorch's ``foreach`` kernels.

Update rules are written once, with ordinary operators. Given tensors they act on one parameter, or on K stacked
models whose hyperparameters broadcast along a leading dimension; given :class:`TensorList` they act on all
parameters of a model at once, a handful of fused kernels instead of one launch a parameter and operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from dpivon.shards import is_sharded

Operand: TypeAlias = "TensorList | Tensor | Sequence[float] | float"


def joins(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors are computed with as one flat tensor: on a GPU, where a launch costs more than the copy."""
    dtype, index = tensors[0].dtype, tensors[0].get_device()
    alike = all(t.is_cuda and t.dtype is dtype and t.get_device() == index for t in tensors)
    return alike and not any(map(is_sharded, tensors))


def in_parts(tensors: Sequence[Tensor], most: int = 2**26) -> Iterator[list[Tensor]]:
    """The tensors in order, some at a time: of at most so many numbers together, or one tensor. What is computed of one part is
    let go before the next, and a large model needs room for a part of itself only."""
    part: list[Tensor] = []
    for t in tensors:
        if part and sum(own.numel() for own in part) + t.numel() > most:
            yield part
            part = []
        part.append(t)
    if part:
        yield part


def neighbours(tensors: Sequence[Tensor]) -> Tensor | None:
    """The flat tensor that these are consecutive views of, as the results of joined lists are; None if they are not.

    Asked anew every time: a parameter or a state may have been given other memory since.
    """
    first = tensors[0]
    size, begin = first.element_size(), first.data_ptr()
    at = begin
    for t in tensors:
        if t.data_ptr() != at or not t.is_contiguous():
            return None
        at += t.numel() * size
    memory = first.untyped_storage()
    if at > memory.data_ptr() + memory.nbytes():
        return None  # pieces of memory that happen to follow each other
    return first.as_strided(((at - begin) // size,), (1,))


def room_for(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Memory for tensors of these shapes and dtypes: one piece of it where dtype and device allow."""
    if len(set(dtypes)) != 1 or len({t.device for t in tensors}) != 1:
        return [torch.empty(t.shape, dtype=dtype, device=t.device) for t, dtype in zip(tensors, dtypes, strict=True)]
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=dtypes[0], device=tensors[0].device)
    return TensorList.of(flat, [t.shape for t in tensors]).tensors


def views(flat: Tensor, shapes: Sequence[torch.Size], sizes: list[int]) -> list[Tensor]:
    """One flat tensor as tensors of these shapes and sizes, one after the other."""
    parts = flat.split_with_sizes(sizes)
    return [part if len(shape) == 1 else part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class TensorList:
    """An immutable list of tensors with elementwise arithmetic.

    The other operand is a scalar, a list of scalars (one a tensor), or another list of the same length. On a GPU the list
    is joined into one flat tensor when it is first computed with, and what comes out are views of flat results. Such views
    are joined again without a copy.
    """

    __slots__ = ("_flat", "_known", "_tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors: list[Tensor] | None = list(tensors)
        self._flat: Tensor | None = None
        self._known: list[torch.Size] | None = None

    @classmethod
    def of(cls, flat: Tensor, shapes: list[torch.Size]) -> TensorList:
        """Views of one flat tensor, one after the other."""
        result = object.__new__(cls)
        result._tensors, result._flat, result._known = None, flat, shapes
        return result

    @property
    def _shapes(self) -> list[torch.Size]:
        if self._known is None:
            self._known = [t.shape for t in self.tensors]
        return self._known

    @property
    def tensors(self) -> list[Tensor]:
        if self._tensors is None:
            assert self._flat is not None
            self._tensors = views(self._flat, self._shapes, [shape.numel() for shape in self._shapes])
        return self._tensors

    @property
    def flat(self) -> Tensor | None:
        """All elements as one tensor, where that is how the list computes."""
        if self._flat is None and self._tensors and joins(self._tensors):
            self._flat = neighbours(self._tensors)
            if self._flat is None:
                self._flat = torch.cat([t if t.dim() == 1 else t.reshape(-1) for t in self._tensors])
        return self._flat

    def __len__(self) -> int:
        return len(self._shapes if self._tensors is None else self._tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __getitem__(self, index: int) -> Tensor:
        return self.tensors[index]

    def _with(self, other: Operand, one: Callable[..., Any], each: Callable[..., Any]) -> TensorList:
        """The operation on flat tensors if both sides allow it, else on each pair."""
        flat = self.flat
        if flat is not None:
            if isinstance(other, TensorList):
                right: Any = other.flat if other._shapes == self._shapes else None
            elif isinstance(other, list | tuple):
                right = other[0] if len(set(other)) == 1 else None
            else:
                right = other
            if right is not None:
                return TensorList.of(one(flat, right), self._shapes)
        return TensorList(each(self.tensors, other.tensors if isinstance(other, TensorList) else other))

    def _map(self, one: Callable[..., Any], each: Callable[..., Any], *args: Any) -> TensorList:
        flat = self.flat
        if flat is not None:
            return TensorList.of(one(flat, *args), self._shapes)
        return TensorList(each(self.tensors, *args))

    def __add__(self, other: Operand) -> TensorList:
        return self._with(other, torch.add, torch._foreach_add)

    def __sub__(self, other: Operand) -> TensorList:
        return self._with(other, torch.sub, torch._foreach_sub)

    def __mul__(self, other: Operand) -> TensorList:
        return self._with(other, torch.mul, torch._foreach_mul)

    def __truediv__(self, other: Operand) -> TensorList:
        return self._with(other, torch.div, torch._foreach_div)

    def __radd__(self, other: float) -> TensorList:
        return self + other

    def __rmul__(self, other: float) -> TensorList:
        return self * other

    def __rsub__(self, other: float) -> TensorList:
        return -self + other

    def __neg__(self) -> TensorList:
        return self._map(torch.neg, torch._foreach_neg)

    def square(self) -> TensorList:
        return self * self

    def sqrt(self) -> TensorList:
        return self._map(torch.sqrt, torch._foreach_sqrt)

    def rsqrt(self) -> TensorList:
        return self._map(torch.rsqrt, torch._foreach_rsqrt)

    def clamp(self, min: Operand | None = None, max: float | None = None) -> TensorList:
        out = self if min is None else self._with(min, torch.clamp_min, torch._foreach_clamp_min)
        if max is not None:
            out = out._map(torch.clamp_max, torch._foreach_clamp_max, max)
        return out

    def filled(self, draw: Callable[[Tensor], Tensor], *, at_once: bool = True) -> TensorList:
        """New tensors of these shapes from ``draw``: one draw for all where the list is joined, else each in turn."""
        flat = self.flat
        if flat is not None and at_once:
            return TensorList.of(draw(flat), self._shapes)
        return TensorList([draw(t) for t in self.tensors])

    def copied(self, dtypes: Sequence[torch.dtype]) -> TensorList:
        """New tensors with these values, rounded to these dtypes; neighbours in memory where there is only one dtype."""
        flat, alike = self.flat, len(set(dtypes)) == 1
        if flat is not None and alike:
            return TensorList.of(flat.to(dtypes[0], copy=True), self._shapes)
        room = room_for(self.tensors, dtypes)
        self.copy_to(room)
        return TensorList(room)

    def copy_to(self, targets: Sequence[Tensor]) -> None:
        """Write every tensor into its target, in place, casting where the dtypes differ."""
        torch._foreach_copy_(list(targets), self.tensors)


#: What an update rule computes with: one tensor (stacked or not), or all parameters of a model.
Values = TypeVar("Values", Tensor, TensorList)
