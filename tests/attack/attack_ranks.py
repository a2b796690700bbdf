"""Two forked ranks that judge cases together, kept for as many cases as they survive."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attack_case import CASES
from harness import SEVERITY, Verdict, judge, severity

RANKS, PATIENCE = 2, 15.0


def _serve(rank: int, store: str, orders: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        patience = datetime.timedelta(seconds=PATIENCE)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=patience)
        while True:
            orders.send(judge(CASES[orders.recv()], "ddp"))
    except (EOFError, OSError):
        pass  # the parent is done
    finally:
        os._exit(0)


class Ranks:
    """A process group of two, started when first needed and anew after a failure."""

    def __init__(self) -> None:
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def judge(self, name: str) -> Verdict:
        if not self._pipes:
            self._start()
        for pipe in self._pipes:
            pipe.send(name)
        found = []
        for pipe in self._pipes:
            if not pipe.poll(4 * PATIENCE):
                self.stop()
                return Verdict("crash", "the ranks wait for each other")
            try:
                found.append(pipe.recv())
            except EOFError:
                self.stop()
                return Verdict("crash", "a rank ended")
        kinds = {v.kind: v for v in found}
        if kinds.keys() & {"crash", "torch refuses", "rank error"} or len(kinds) > 1:
            self.stop()  # one of them may be in the middle of an exchange
        lost = kinds.pop("rank error", None)  # of the rank that waited for one that refused
        if len(kinds) == 1:
            return kinds.popitem()[1]
        if kinds.keys() <= set(SEVERITY):  # a rank sees what its own copy of the model keeps
            return max(kinds.values(), key=severity)
        return Verdict("crash", "; ".join(str(v) for v in (*kinds.values(), lost) if v is not None))

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        folder = tempfile.mkdtemp()
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, str(Path(folder) / "store"), theirs), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: none of ours is needed
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []


RANKS_OF_THE_MATRIX = Ranks()


def judge_anywhere(name: str, path: str) -> Verdict:
    """The verdict on a case by its name, on any path."""
    case = CASES[name]
    return RANKS_OF_THE_MATRIX.judge(name) if path == "ddp" and path in case.paths else judge(case, path)
