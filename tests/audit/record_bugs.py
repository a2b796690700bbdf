"""Bugs of the record: of accounts that are loaded and of ledgers that are read, whatever path made the releases.

Each comes with a check that holds for the library as it is, and must not under the bug.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sowing import Patch, attr
from torch import nn

import dpivon.durable.ledger as ledgers
from dpivon import ledger_commands
from dpivon.errors import PrivacyError
from dpivon.privacy.accounting import Accountant
from dpivon.privacy.engine import PrivacyEngine
from dpivon.privacy.mechanism import NoiseSpec
from dpivon.stacked import AnyNetwork, Run, Stack
from dpivon.stacked.checkpoint import StackCheckpoints

DELTA = 1e-5
Check = Callable[[Path], bool]


@dataclass(frozen=True)
class RecordBug:
    name: str
    bug: str
    patch: Patch
    check: Check

    def caught(self) -> bool:
        """Whether the check fails under the bug, and without it does not."""
        with tempfile.TemporaryDirectory() as sound, tempfile.TemporaryDirectory() as broken:
            if not self.check(Path(sound)):
                return False
            with self.patch():
                return not self.check(Path(broken))


def an_account_never_falls(folder: Path) -> bool:
    """A checkpoint of another run with as many releases is offered to an engine."""
    cheap, dear, model = PrivacyEngine(), PrivacyEngine(), nn.Linear(2, 1)
    for engine, sigma in ((cheap, 50.0), (dear, 0.7)):
        engine.accountant.charge(noise_multiplier=sigma, sample_rate=0.1, steps=20)
    cheap.save_checkpoint(path=folder / "c.pt", module=model)
    before = dear.get_epsilon(DELTA)
    with contextlib.suppress(PrivacyError):
        dear.load_checkpoint(path=folder / "c.pt", module=model)
    return dear.get_epsilon(DELTA) >= before


def an_edited_ledger_is_refused(folder: Path) -> bool:
    """σ is changed in one line; two lines change places; a line is left out."""
    path = folder / "ledger.jsonl"
    ledger = ledgers.Ledger(path)
    for sigma, releases in ((0.5, 30), (9.0, 3)):
        ledger.charge((NoiseSpec(sigma, 1.0, 8.0, 0.2).terms,), releases)
    ledger.close()
    head, first, thirty, second, three, _ = path.read_bytes().split(b"\n")
    edited = first.replace(b'"noise_multiplier":0.5', b'"noise_multiplier":5.5')
    return all(
        _refused(path, lines)
        for lines in ([head, edited, thirty, second, three], [head, second, thirty, first, three], [head, first, thirty, three])
    )  # fmt: skip


def _refused(path: Path, lines: Sequence[bytes]) -> bool:
    path.write_bytes(b"\n".join([*lines, b""]))
    try:
        ledgers.read(path)
    except PrivacyError:
        return True
    return False


def _shown(path: Path) -> dict[str, float]:
    found = ledger_commands._described(path, DELTA, "")
    return {run["run"]: run["rows"][0]["noise_multiplier"] for run in found["runs"]}


def a_stack_shows_each_run_its_own_noise(folder: Path) -> bool:
    """The stack sorts its runs by method, so that their order in the ledger is another than here."""
    sigmas = {"z": 2.0, "a": 0.5}
    runs = [Run("dp-adam", 1, sigmas["z"], 1.0, 0.1, 4), Run("dp-sgd", 2, sigmas["a"], 1.0, 0.1, 4)]
    images, labels = torch.zeros(16, 3, 2, 2), torch.zeros(16, dtype=torch.long)
    network = AnyNetwork(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 2)))
    kept = StackCheckpoints(Stack(runs, network, images, labels), folder, list(sigmas))
    kept.restore()
    for _ in kept.stack.train(1):
        pass
    kept.close()
    return _shown(folder / "ledger.jsonl") == sigmas


def an_old_ledger_shows_each_run_its_own_noise(folder: Path) -> bool:
    """Of version 1, without names; the ids beside it are in the plan's order."""
    sigmas = {f"dp-x-b4-sigma{sigma:g}-C1-lr1-seed0": sigma for sigma in (2.0, 0.5)}
    terms = [NoiseSpec(sigma, 1.0, 4.0, 0.25).terms for sigma in sorted(sigmas.values())]
    lines = [{"dpivon_ledger": 1, "id": "old"}, {"terms": terms}, {"to": 3, "n": 3}]
    (folder / "ledger.jsonl").write_bytes(ledgers._sealed(lines, "")[0])
    (folder / "runs.json").write_text(json.dumps(list(sigmas)))
    return _shown(folder / "ledger.jsonl") == sigmas


def counted_only() -> Patch:
    return attr(Accountant, "excess", lambda original: lambda self, o: "" if len(o) >= len(self) else original(self, o))


def named_by_place() -> Patch:
    def init(original: Any) -> Any:
        def other(self: Any, stack: Any, folder: Path, names: Any = None) -> None:
            original(self, stack, folder, names)
            stack.mechanism.names = tuple(names)

        return other

    return attr(StackCheckpoints, "__init__", init)


def zipped() -> Patch:
    return attr(
        ledger_commands, "run_names", lambda o: lambda path, r: json.loads(path.with_name("runs.json").read_text())
    )


def record_bugs() -> list[RecordBug]:
    from counting_bugs import counting_bugs  # which needs RecordBug

    falls, edited = an_account_never_falls, an_edited_ledger_is_refused
    stacks, old = a_stack_shows_each_run_its_own_noise, an_old_ledger_shows_each_run_its_own_noise
    blind = attr(ledgers, "_seal", lambda original: lambda before, body: "0" * 16)
    loose = attr(ledgers, "_seal", lambda original: lambda before, body: original("", body))
    return [
        RecordBug("a loaded account is counted, not compared", "ε falls to that of another run", counted_only(), falls),
        RecordBug("the chain of a ledger is not verified", "σ can be edited", blind, edited),
        RecordBug("lines of a ledger are not chained", "they can change places", loose, edited),
        RecordBug("a stack's runs named by place", "another run's σ is shown", named_by_place(), stacks),
        RecordBug("ids paired with a ledger by place", "another run's σ is shown", zipped(), old),
        *counting_bugs(),
    ]
