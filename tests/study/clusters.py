"""A Ray cluster on this machine for tests, and what is done to its workers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

from dpivon.durable.ledger import read
from dpivon.errors import PrivacyError
from dpivon.study.plan import Plan, PlannedRun

LONG = Plan(
    name="long",
    dataset="digits",
    network="small",
    split="final",
    epochs=4,
    delta=1e-4,
    mc_samples=2,
    seed=0,
    runs=(
        PlannedRun("dp-sgd", 64, 1.0, 1.0, 0, 0.5),
        PlannedRun("dp-ivon-gradsq", 64, 1.0, 1.0, 0, 0.5),
        PlannedRun("dp-adam", 128, 2.0, 1.0, 0, 0.01),
    ),
)


def holder(path: Path) -> int | None:
    """The process, other than this, that has a file open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == str(path) and int(link.parts[2]) != os.getpid():
                return int(link.parts[2])
    return None


def charged(folder: Path) -> int:
    with contextlib.suppress(PrivacyError, OSError):
        return read(folder / "ledger.jsonl").releases
    return 0


@contextlib.contextmanager
def caught(folder: Path, after: int):
    """The process that trains in a folder, stopped where it has made releases that no checkpoint has; None elsewhere."""
    process = holder(folder / "ledger.jsonl.lock") if charged(folder) >= after else None
    try:
        if process is not None:
            os.kill(process, signal.SIGSTOP)
    except ProcessLookupError:
        process = None
    newest = max((int(f.stem.split("-")[1]) for f in folder.glob("release-*.safetensors")), default=0)
    yield process if charged(folder) > newest > 0 else None
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


class Killer(threading.Thread):
    """Kills the first process that trains in one of ``folders()`` and has ``after`` releases, some of them in no checkpoint."""

    def __init__(self, folders, *, after: int, only_stop: bool = False) -> None:
        super().__init__(daemon=True)
        self.folders, self.after, self.killed, self.only_stop = folders, after, 0, only_stop
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            for folder in self.folders():
                with caught(folder, self.after) as process:
                    if process is not None and self.only_stop:
                        self.killed = charged(folder)
                        self._wait_for_its_end(process)
                        return
                    if process is not None:
                        os.kill(process, signal.SIGKILL)
                        self.killed = charged(folder)
                        return
            time.sleep(0.002)

    @staticmethod
    def _wait_for_its_end(process: int) -> None:
        """It stays stopped until somebody ends it."""
        while Path(f"/proc/{process}").exists():
            time.sleep(0.05)
