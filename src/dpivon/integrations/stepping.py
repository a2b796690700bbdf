"""The step of :meth:`dpivon.PrivacyEngine.compile` inside trainers that call ``optimizer.step`` themselves."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from dpivon.privacy import DPOptimizer


def step_through(optimizer: DPOptimizer, make: Callable[[Any], Any]) -> None:
    """From here on ``optimizer.step(closure)`` is ``make(closure)``; within that it is the optimizer's own again.

    So a trainer goes on calling the optimizer that it knows, and ``make`` runs a compiled step, which calls it too.
    """
    own, inside = optimizer.step, False

    def step(self: DPOptimizer, closure: Any = None) -> Any:
        nonlocal inside
        if inside:
            return own(closure)
        inside = True
        try:
            return make(closure)
        finally:
            inside = False

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
