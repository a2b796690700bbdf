"""Lists of tensors that compute like one tensor, through PyTorch's ``foreach`` kernels.

Update rules are written once, with ordinary operators. Given tensors they act on one parameter, or on K stacked
models whose hyperparameters broadcast along a leading dimension; given :class:`TensorList` they act on all
parameters of a model at once, a handful of fused kernels instead of one launch a parameter and operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

Operand: TypeAlias = "TensorList | Tensor | Sequence[float] | float"


class TensorList:
    """An immutable list of tensors with elementwise arithmetic.

    The other operand is a scalar, a list of scalars (one a tensor), or another list of the same length.
    """

    __slots__ = ("tensors",)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __getitem__(self, index: int) -> Tensor:
        return self.tensors[index]

    def __add__(self, other: Operand) -> TensorList:
        return TensorList(torch._foreach_add(self.tensors, _raw(other)))

    def __sub__(self, other: Operand) -> TensorList:
        return TensorList(torch._foreach_sub(self.tensors, _raw(other)))

    def __mul__(self, other: Operand) -> TensorList:
        return TensorList(torch._foreach_mul(self.tensors, _raw(other)))

    def __truediv__(self, other: Operand) -> TensorList:
        return TensorList(torch._foreach_div(self.tensors, _raw(other)))

    def __radd__(self, other: float) -> TensorList:
        return self + other

    def __rmul__(self, other: float) -> TensorList:
        return self * other

    def __rsub__(self, other: float) -> TensorList:
        return -self + other

    def __neg__(self) -> TensorList:
        return TensorList(torch._foreach_neg(self.tensors))

    def square(self) -> TensorList:
        return self * self

    def sqrt(self) -> TensorList:
        return TensorList(torch._foreach_sqrt(self.tensors))

    def rsqrt(self) -> TensorList:
        return TensorList(torch._foreach_rsqrt(self.tensors))

    def clamp(self, min: float | None = None, max: float | None = None) -> TensorList:
        out: list[Tensor] | tuple[Tensor, ...] = self.tensors
        if min is not None:
            out = torch._foreach_clamp_min(out, min)
        if max is not None:
            out = torch._foreach_clamp_max(out, max)
        return TensorList(out)

    def copy_to(self, targets: Sequence[Tensor]) -> None:
        """Write every tensor into its target, in place, casting where the dtypes differ."""
        torch._foreach_copy_(list(targets), self.tensors)


#: What an update rule computes with: one tensor (stacked or not), or all parameters of a model.
Values = TypeVar("Values", Tensor, TensorList)


def _raw(other: Operand) -> Any:
    return other.tensors if isinstance(other, TensorList) else other
