"""What a stack's training data was asked for temperatures: on disk before an answer is drawn.

A temperature is k answers, and the runs of a stack get theirs in groups, as they are evaluated. A ledger charges all runs of a
stack alike, so all are charged for k answers before the first group asks. ``asked.json`` then gets a keyed digest of every sum
before noise is added to it. Whoever was killed since asks again: the same sums get the same noise, so the answers are the very
ones that were lost. Where a sum is another one, or the file is gone, noise is new and all runs are charged once more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dpivon.durable.files import replace
from dpivon.durable.ledger import Terms
from dpivon.errors import PrivacyError
from dpivon.privacy.noise import SEEDED
from dpivon.privacy.spec import NoiseSpec
from dpivon.privacy.stack import StackedMechanism
from dpivon.privacy.temperature import HALVINGS, temperature_releases, temperature_spec

ASKED = "asked.json"


class Another(Exception):
    """A sum that is not the one that was asked for before."""


class Asked:
    """The questions of a stack that is kept in ``folder``. ``ahead`` hears of charges before they are made, and of every note
    before it is written: it raises where somebody newer is at work on the stack."""

    def __init__(
        self,
        folder: Path,
        mechanism: StackedMechanism,
        noise_multiplier: float,
        ahead: Callable[[Terms, int], None],
    ) -> None:
        self.path, self.mechanism, self.ahead = folder / ASKED, mechanism, ahead
        self.spec = temperature_spec(noise_multiplier).replace(drawn_by=(SEEDED, SEEDED))
        self.at, self.sums = self._read()  # the number of the first answer's release; digests by run and halving

    def cover(self) -> None:
        """Charge every run for its answers, unless that was done."""
        assert self.mechanism.ledger is not None
        record = self.mechanism.ledger.record
        if self.at < 0 or any(record.terms_at(self.at + i) != self._terms for i in range(HALVINGS)):
            self.charge()

    def charge(self) -> None:
        """Charge every run for answers to come, all of them new. The file first: it tells what the charge is for."""
        self.at, self.sums = self.mechanism.charged, {}
        self._write()
        self.mechanism.charge_beside(self.spec, HALVINGS)

    def covers(self, spec: NoiseSpec) -> None:
        """In the place of a charge that was made before."""
        if spec.terms != self.spec.terms:
            raise PrivacyError(f"{self.path}: covers {self.spec.terms}, not {spec.terms}. Charge it by itself.")

    def seed(self, seed: int) -> int:
        """Of the noise of a run with this seed: its own for its first answers, another whenever it is charged again."""
        assert self.mechanism.ledger is not None
        record = self.mechanism.ledger.record
        if temperature_releases(record) == temperature_releases(record, since=self.at):
            return seed
        return int.from_bytes(hashlib.sha256(f"{seed} temperature {self.at}".encode()).digest()[:8], "big") >> 1

    def questions(self, runs: Sequence[str]) -> Callable[[Sequence[Tensor]], None]:
        """For runs that ask together, halving by halving: notes their sums, or raises if one is not what it was."""
        step = 0

        def before(sums: Sequence[Tensor]) -> None:
            nonlocal step
            at, step = self.at + step, step + 1
            new = False
            for run, total in zip(runs, torch.stack(list(sums)).double().cpu(), strict=True):
                noted, evidence = self.sums.setdefault(run, []), self.mechanism.evidence(total, at)
                if len(noted) < step:
                    noted.append(evidence)
                    new = True
                elif noted[step - 1] != evidence:
                    raise Another
            if new:
                self._write()

        return before

    @property
    def _terms(self) -> Terms:
        return self.mechanism.named([self.spec.terms] * len(self.mechanism.specs))

    def _read(self) -> tuple[int, dict[str, list[str]]]:
        """A file that is not there, or that somebody spoiled, covers nothing."""
        try:
            found = json.loads(self.path.read_text())
            return int(found["at"]), {str(run): list(map(str, sums)) for run, sums in found["sums"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return -1, {}

    def _write(self) -> None:
        """Not by who was given up for lost. Locks keep him from the folder, but on a drive whose locks do not hold he would put
        his own questions in the place of newer ones; asked again, those could get the noise that another sum has had."""
        self.ahead(self._terms, self.at + HALVINGS)
        replace(self.path, json.dumps({"at": self.at, "sums": self.sums}).encode())
