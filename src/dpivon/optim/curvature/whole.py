"""One number for all weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from dpivon.optim.curvature.averages import SquareAverage
from dpivon.optim.curvature.base import Evidence
from dpivon.optim.tensors import TensorList


@dataclass(frozen=True)
class Whole(SquareAverage):
    """v̂ = M, the mean over all P weights that are updated together (a group of parameters, a run of a stack) of a, the average
    of g² − s².

    P (M + s²) estimates E‖g‖². A step that divides by √(M + s²) goes in the direction of the release, as gradient descent does,
    at the step size D/√(T E‖g‖²) that its theory asks for under noise.

    Bias of one coordinate: M − v_i, whatever the noise; of the mean over all: none. Variance: e²/P, the least that any of these
    can have; M is known where single weights, rows and tensors are not. Not projected: M is negative where the signal is not
    known to be there.
    """

    base: ClassVar[str] = "whole"
    elementwise: ClassVar[bool] = False
    whole: ClassVar[bool] = True
    remembers: ClassVar[tuple[str, ...]] = ("second",)

    def moment(self, evidence: Evidence[Any]) -> Any:
        a = self.average(evidence)
        if isinstance(a, Tensor):
            return a.mean(1, keepdim=True).expand_as(a)
        mean = sum(each.sum() for each in a) / sum(each.numel() for each in a)
        return TensorList([mean.to(each).expand_as(each) for each in a])
