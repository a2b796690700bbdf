"""How a bug is sown: a patch at run time, on the paths on which it can be had.

``paths`` maps a path to the patch for it, or to the reason why the bug cannot be had there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import dpivon.privacy.engine as engines
from dpivon.audit.session import PATHS, STACK_PATHS
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.kernels.padded import PaddedGradients
from dpivon.privacy.kernels.reference import LoopedGradients

Patch = Callable[[], Any]  # makes a context manager
GRADIENTS = {
    "bookkeeping": BookKeeper,
    "alone": BookKeeper,
    "distributed": BookKeeper,
    "stacked": LoopedGradients,
    "captured": PaddedGradients,
}


@dataclass(frozen=True)
class Mutant:
    name: str
    bug: str
    expect: str  # part of the name of the check that should see it first
    paths: dict[str, Patch | str] = field(default_factory=dict)
    on: dict[str, Any] = field(default_factory=dict)  # how the probe is varied: a bug of views needs them


def attr(target: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """Replace an attribute by what ``make`` makes of the original."""
    return lambda: mock.patch.object(target, name, make(getattr(target, name)))


def both(*patches: Patch) -> Patch:
    @contextmanager
    def entered() -> Iterator[None]:
        with patches[0]():
            if len(patches) == 1:
                yield
            else:
                with both(*patches[1:])():
                    yield

    return entered


def unrehearsed(patch: Patch) -> Patch:
    """The bug without the check on made-up inputs, which would refuse the model before an audit sees it."""
    return both(patch, attr(engines, "check_model_rows", lambda original: lambda *given, **options: None))


def everywhere(engine: Patch | str, stacks: Patch | str, **special: Patch | str) -> dict[str, Patch | str]:
    return {path: special.get(path, stacks if path in STACK_PATHS else engine) for path in PATHS}
