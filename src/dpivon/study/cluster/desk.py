"""The desk: a small actor beside the driver that workers talk to.

It knows which attempt at a stack is the current one, and has nothing to do with any other: a node that was given up for
lost and is not dead gets nothing more charged and nothing more kept. For a worker that does not see the folder of results
it holds the stack's ledger there, charged before the releases are made, and the checkpoints that the worker sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dpivon.durable.checkpoint import Rotation
from dpivon.durable.ledger import Ledger, Terms
from dpivon.errors import DpivonError
from dpivon.privacy.accounting.recorded import LEDGER
from dpivon.study.results.folder import Results


class Superseded(DpivonError):
    """Another attempt at the same stack has taken over."""


@dataclass(frozen=True)
class Report:
    """How far an attempt is."""

    attempt: int
    restored: float = 0.0  # examples that attempts before it had done
    done: float = 0.0  # examples, with those
    words: str = ""
    where: str = ""  # the node's name and the worker's process


class Desk:
    """See the module. Every method but :meth:`poll`, :meth:`collect` and :meth:`stop` is about one attempt at one stack."""

    def __init__(self, stacks: Path) -> None:
        self._stacks = stacks
        self._current: dict[str, int] = {}
        self._ledgers: dict[str, Ledger] = {}
        self._reports: dict[str, Report] = {}
        self._delivered: list[Results] = []
        self._stopping = False

    # ---- for the driver

    def expect(self, stack: str, attempt: int) -> None:
        """From now on this attempt is the stack's only one."""
        self.forget(stack)
        self._current[stack] = attempt

    def forget(self, stack: str) -> None:
        """No attempt at it is under way; its ledger is let go."""
        self._current.pop(stack, None)
        self._reports.pop(stack, None)
        if (ledger := self._ledgers.pop(stack, None)) is not None:
            ledger.close()

    def stop(self) -> None:
        """Every attempt ends at its next block."""
        self._stopping = True

    def poll(self) -> Mapping[str, Report]:
        return dict(self._reports)

    def collect(self) -> list[Results]:
        """What was delivered since the last call."""
        found, self._delivered = self._delivered, []
        return found

    # ---- for workers

    def begin(self, stack: str, report: Report) -> bool:
        """False if it need not: the study is being stopped."""
        self._check(stack, report.attempt)
        return self.report(stack, report)

    def report(self, stack: str, report: Report) -> bool:
        """False if the attempt shall stop."""
        if self._current.get(stack) != report.attempt:
            return False
        self._reports[stack] = report
        return not self._stopping

    def files(self, stack: str, attempt: int) -> dict[str, bytes]:
        """The ledger and the checkpoints of a stack, for a worker that does not see them; from here on its charges go here."""
        self._check(stack, attempt)
        folder = self._stacks / stack
        self._ledgers[stack] = Ledger(folder / LEDGER)
        return {path.name: path.read_bytes() for path in (folder / LEDGER, *Rotation(folder).files())}

    def reserve(self, stack: str, attempt: int, terms: Terms, upto: int) -> bool:
        """When this returns, all releases up to number ``upto`` may be made; here they are on disk first.

        False if the attempt shall stop at its next block. It is asked before every stretch of blocks, so none outruns a stop,
        however seldom it reports; and what it had no time to make is given back with the checkpoint.
        """
        self._check(stack, attempt)
        ledger = self._ledgers.get(stack)
        if ledger is not None and upto > ledger.record.releases:
            ledger.charge(terms, upto - ledger.record.releases)
        return not self._stopping

    def keep(self, stack: str, attempt: int, name: str, checkpoint: bytes, charged: int) -> None:
        """A checkpoint that was made elsewhere; what was reserved beyond ``charged`` was not made and is given back."""
        self._check(stack, attempt)
        Rotation(self._stacks / stack).adopt(name, checkpoint)
        ledger = self._ledgers[stack]  # after the checkpoint: a crash charges more, not less
        ledger.give_back(max(0, ledger.record.releases - charged))

    def deliver(self, stack: str, attempt: int, results: Results) -> None:
        """Rows of runs that are evaluated, for the tables."""
        self._check(stack, attempt)
        self._delivered.append(results)

    def _check(self, stack: str, attempt: int) -> None:
        if self._current.get(stack) != attempt:
            words = f"attempt {attempt} was given up for lost, and another has taken over. Let it end."
            raise Superseded(f"stack {stack}: {words}")
