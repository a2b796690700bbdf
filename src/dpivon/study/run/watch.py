"""What the paper's discussion conjectures about, measured while IVON's runs train.

Only released values are read. g_dp itself is not kept by a stack, but the momentum before and after a step gives it
back, s′ = β₁ s + (1 − β₁) g_dp; so a share of targets projected to zero costs no look behind the boundary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dpivon.stacked import Stack
from dpivon.study.results.table import QUANTILES

_AT = (0.05, 0.5, 0.95)


def points(steps: int, number: int = 50) -> list[int]:
    """About so many steps from the first to the last, evenly spaced in their logarithm."""
    exponents = (math.log(steps) * k / (number - 1) for k in range(number))
    return sorted({min(steps, max(1, round(math.exp(e)))) for e in exponents})


class Watch:
    """Look at a stack before and after one step."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._before: list[tuple[Tensor, Tensor]] = []

    @property
    def useful(self) -> bool:
        return any(True for _ in self._parts())

    def before(self) -> None:
        self._before = [(part.state["momentum"].clone(), part.hyper["noise_variance"]) for part in self._parts()]

    def after(self) -> list[dict[str, Any]]:
        """One row per run that has a posterior: ``run`` in the caller's numbering, the share and the quantiles."""
        out, widths = [], self.stack.std
        for part, (before, variance) in zip(self._parts(), self._before, strict=True):
            beta1 = part.hyper["beta1"]
            g = (part.state["momentum"] - beta1 * before) / (1.0 - beta1)
            share = (g.square() < variance).double().mean(1)
            at = torch.tensor(_AT, device=g.device)
            for j, row in enumerate(range(part.rows.start, part.rows.stop)):
                h, width = _quantiles(part.state["hess"][j], at), _quantiles(widths[row], at)
                found = dict(zip((f"h_{q}" for q in QUANTILES), h.tolist(), strict=True))
                found |= dict(zip((f"std_{q}" for q in QUANTILES), width.tolist(), strict=True))
                out.append({"run": self.stack.order[row], "projected_share": float(share[j])} | found)
        return out

    def _parts(self) -> Iterator[Any]:
        for part in self.stack.parts:
            if {"momentum", "hess"} <= part.state.keys() and {"beta1", "ess"} <= part.hyper.keys():
                yield part


def _quantiles(values: Tensor, at: Tensor) -> Tensor:
    """Of finite or infinite values; NaN counts as the largest."""
    ordered = values.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).sort().values
    return ordered[((len(ordered) - 1) * at).round().long()]
