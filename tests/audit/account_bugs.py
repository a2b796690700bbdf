"""Bugs of the account: late, missing or too little."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from noise_bugs import engine_release
from sowing import Patch, attr, both, everywhere

import dpivon.privacy.optimizer as optimizers
import dpivon.stacked.stack as stacked
from dpivon.privacy.accounting import Accountant, rdp
from dpivon.privacy.engine import PrivacyEngine
from dpivon.privacy.stack import StackedMechanism
from dpivon.release import Release


def charged_late() -> dict[str, Patch | str]:
    def engine(original: Any, sums: Any, spec: Any, noise: Any, charge: Any) -> Release:
        made = original(sums, spec, noise, lambda spec: None)
        charge(spec)
        return made

    def train(original: Any) -> Any:
        def late(self: Any, steps: int) -> Iterator[int]:
            reserve, self.mechanism.reserve = self.mechanism.reserve, lambda n: setattr(self.mechanism, "reserved", n)
            try:
                for done in original(self, steps):
                    reserve(1)
                    self.mechanism.reserved = 0
                    yield done
            finally:
                self.mechanism.reserve = reserve

        return late

    def launched(original: Any) -> Any:
        def late(program: Any, spec: Any, charge: Any) -> Release:
            made: Release = program(spec)
            charge(spec)
            return made

        return late

    eager = engine_release(engine)
    program = both(eager, attr(optimizers, "release_by", launched))
    return everywhere(eager, attr(stacked.Stack, "train", train), compiled=program)


def charges(engine: Callable[..., Any], stacks: Callable[..., Any]) -> dict[str, Patch | str]:
    return everywhere(attr(PrivacyEngine, "_charge", engine), attr(StackedMechanism, "reserve", stacks))


def not_charged() -> dict[str, Patch | str]:
    return charges(
        lambda o: lambda self, spec: None, lambda o: lambda self, n: setattr(self, "reserved", self.reserved + n)
    )


def charged_every_other() -> dict[str, Patch | str]:
    def engine(original: Any) -> Any:
        def charge(self: Any, spec: Any) -> None:
            self.turn = getattr(self, "turn", 0) + 1
            if self.turn % 2:
                original(self, spec)

        return charge

    def stacks(original: Any) -> Any:
        def reserve(self: Any, n: int) -> None:
            self.turn = getattr(self, "turn", 0) + 1
            if self.turn % 2:
                original(self, n)
            else:
                self.reserved += n

        return reserve

    return charges(engine, stacks)


def charged_as(**change: Callable[[float], float]) -> dict[str, Patch | str]:
    """The account gets another σ or q than was used."""

    def charge(original: Any) -> Any:
        def other(self: Any, *, noise_multiplier: float, sample_rate: float, steps: int = 1) -> None:
            values = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate}
            original(self, steps=steps, **{k: change[k](v) if k in change else v for k, v in values.items()})

        return other

    patch = attr(Accountant, "charge", charge)
    return everywhere(patch, patch)


def too_small_epsilon() -> dict[str, Patch | str]:
    patch = attr(rdp, "epsilon", lambda original: lambda *a: 0.5 * original(*a))
    return everywhere(patch, patch)


def roundings_dropped() -> dict[str, Patch | str]:
    return everywhere(
        "nothing is compiled",
        "nothing is compiled on a CPU",
        captured="needs a GPU: tests/gpu holds the compiled program to C",
        compiled="needs a GPU: tests/gpu holds the compiled program to C",
    )
