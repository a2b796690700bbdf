"""Runs in processes of their own, forked from one that has the libraries loaded: a kill then falls into training."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  every optimizer wants it, and it takes longer to import than a run to train
from moments import Aim, Clock

from dpivon.durable.ledger import read
from dpivon.errors import PrivacyWarning
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.accounting.recorded import history

DELTA = 1e-3
Task = Callable[..., str]


class Child:
    """``task(folder, witness, **options)`` in a process; what it says of the model it ends with is in ``said``."""

    def __init__(
        self,
        folder: Path,
        task: Task,
        *,
        aim: Aim | None = None,
        limit: int | None = None,
        may_warn: bool = False,
        **options: Any,
    ) -> None:
        self.folder, self.said = folder, folder.with_suffix(".said")
        self.witness, self.clock = folder.with_suffix(".seen"), Clock()
        self.seen_before = len(self._lines())
        self.said.unlink(missing_ok=True)
        self.pid = os.fork()
        if self.pid == 0:
            code: Any = 3
            try:
                if limit:
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                warnings.simplefilter("error")
                if may_warn:
                    warnings.simplefilter("ignore", PrivacyWarning)
                self.clock.watch()
                if aim is not None:
                    aim.set()
                self.said.write_text(task(folder, self.witness, **options))
                code = 0
            except SystemExit as stop:
                code = stop.code
            except BaseException as error:
                with contextlib.suppress(OSError):
                    self.said.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
                    self.said.with_suffix(".trace").write_text(traceback.format_exc())
            finally:
                os._exit(code)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def after(self, releases: int, seconds: float = 0.0) -> None:
        """Wait until this process has shown so many releases, and so long again, or is gone."""
        while len(self._lines()) - self.seen_before < releases and self._lives():
            time.sleep(0.0005)
        time.sleep(seconds)

    def _lives(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def _lines(self) -> list[str]:
        return self.witness.read_text().split() if self.witness.exists() else []

    @property
    def shown(self) -> int:
        """Releases that this process has shown, repeated ones too."""
        return len(self._lines()) - self.seen_before

    @property
    def seen(self) -> set[str]:
        """All that anybody ever saw of this run."""
        return set(self._lines())

    @property
    def error(self) -> str:
        path = self.said.with_suffix(".error")
        return path.read_text() if path.exists() else ""


def releases(folder: Path) -> int:
    path = folder / "ledger.jsonl"
    return read(path).releases if path.exists() else 0


def spent(folder: Path) -> list[float]:
    """ε of every run of the ledger."""
    record = read(folder / "ledger.jsonl")
    return [epsilon(history(record, run), DELTA, "rdp") for run in range(record.runs)]
