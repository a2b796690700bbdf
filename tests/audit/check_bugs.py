"""Bugs of the library's own checks: each lets through a program that a check refuses, or runs otherwise.

Such programs are no subjects of the audit, which is about models that the library accepts. So each bug comes with its program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import careless_programs as careless
from careless_programs import Program
from sowing import Patch, attr

import dpivon.privacy.engine as engines
import dpivon.privacy.forward_watch as watching
import dpivon.privacy.handed_over as handed_over
import dpivon.privacy.independence as independence
import dpivon.privacy.losses as losses
from dpivon.privacy.forward_watch import ForwardWatch
from dpivon.privacy.gradients.bookkeeping import BookKeeper


@dataclass(frozen=True)
class CheckBug:
    """``sound`` is what the library does with the program as it is."""

    name: str
    bug: str
    patch: Patch
    program: Program
    sound: str = "refused"

    def shown(self) -> str:
        """What the program does under the bug."""
        with self.patch():
            return self.program.outcome()

    def caught(self) -> bool:
        """Whether the program shows the bug, and without it is refused, or right."""
        return self.program.outcome() == self.sound and self.shown() != self.sound


def _nothing(original: Any) -> Any:
    return lambda *given, **options: None


def rows_unchecked() -> Patch:
    def record(original: Any) -> Any:
        def blind(self: Any, *given: Any) -> None:
            rows, self.rows = self.rows, None
            try:
                original(self, *given)
            finally:
                self.rows = rows

        return blind

    return attr(BookKeeper, "_record", record)


def outputs_only() -> Patch:
    def hold(original: Any) -> Any:
        def outputs_only(self: Any, found: Any, apart: Any, examples: Any, weights: Any) -> None:
            self._hold_outputs(found.outputs, [outcome.outputs for outcome in apart], examples)

        return outputs_only

    return attr(independence._Rehearsal, "_hold", hold)


def values_only() -> Patch:
    def compare(original: Any) -> Any:
        def values(self: Any) -> None:
            held, self._held = self._held, {}
            pairs = zip(held, self._values, watching._values(list(held.values())), strict=True)
            self._changed += [name for name, before, after in pairs if before != after]

        return values

    return attr(ForwardWatch, "_compare", compare)


def uses_outside_dropped() -> Patch:
    def check(original: Any) -> Any:
        def blind(self: Any, params: Any) -> None:
            for p in params:
                p.grad = None
            original(self, params)

        return blind

    return attr(BookKeeper, "_check", check)


def check_bugs() -> list[CheckBug]:
    folded = Program(careless.Folded, positions=8, unchecked=True)
    turned, centred, bare = Program(careless.Turned), Program(careless.Centred), Program(careless.Scaled)
    halves = Program(careless.Two, careless.in_halves, neighbours=False)
    written, replaced = (Program(kind, unchecked=True) for kind in (careless.Written, careless.Replaced))
    remembers, later = (Program(lambda n=n: careless.Remembering(n), steps=n + 2) for n in (0, 40))
    each, by_torch = (
        Program(careless.Two, loss, bound=2.0) for loss in (careless.weighted_each, careless.weighted_by_torch)
    )
    handed = Program(careless.Two, careless.weighted_mean, bound=2.0, checks=True)
    penalty = Program(careless.Two, careless.with_penalty)
    one_pass, untried = attr(BookKeeper, "_note_pass", _nothing), attr(losses, "check_rows", _nothing)
    no_look = attr(losses._Look, "__call__", _nothing)
    unrehearsed = attr(engines, "check_model_rows", _nothing)
    expanded = attr(BookKeeper, "watch_more_closely", lambda original: lambda self, error: False)
    blind = attr(watching, "_values", lambda original: lambda tensors: [0] * len(tensors))
    unkept = attr(independence._Rehearsal, "_check_attributes", _nothing)
    unseen = attr(ForwardWatch, "_check_attributes", _nothing)
    return [
        CheckBug("rows of a layer not counted", "positions pass for examples", rows_unchecked(), folded),
        CheckBug("a second forward not noticed", "two examples clipped as one", one_pass, halves),
        CheckBug("models not tried on made-up inputs", "rows that mix pass", unrehearsed, centred),
        CheckBug("only outputs compared", "rows in another order pass", outputs_only(), turned),
        CheckBug("expanded parameters kept", "code that reduces them sees all copies", unrehearsed, bare, "right"),
        CheckBug("no way back from expanded parameters", "a right model is refused", expanded, bare, "right"),
        CheckBug("values of tensors not compared", "writes through .data pass", blind, written),
        CheckBug("versions and places not compared", "a replaced buffer passes", values_only(), replaced),
        CheckBug("attributes not tried", "a running mean passes", unkept, remembers),
        CheckBug("attributes not watched", "one that is kept later passes", unseen, later),
        CheckBug("PerExampleLoss not tried", "a loss over all rows passes", untried, each),
        CheckBug("engine.check looks at nothing", "the same", attr(handed_over, "check_loss_rows", _nothing), handed),
        CheckBug("torch's weighted means not seen", "a label rescales all", no_look, by_torch),
        CheckBug("uses outside of layers dropped", "another gradient", uses_outside_dropped(), penalty),
    ]
