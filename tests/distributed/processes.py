"""Real processes that form a group over loopback, for tests."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _one(
    rank: int, world: int, store: str, timeout: float, work: Callable[..., Any], args: tuple[Any, ...], out
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout),
        )
        out.send_bytes(pickle.dumps(("done", work(rank, *args))))  # plain bytes: no memory that must outlive us
    except BaseException as error:
        out.send_bytes(pickle.dumps((type(error).__name__, f"{error}\n{traceback.format_exc()}")))
    os._exit(0)  # nothing of the parent's is run a second time


def launch(world: int, work: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[tuple[str, Any]]:
    """``work(rank, *args)`` in ``world`` forked processes of one gloo group: ("done", result) or (error, text), by rank.

    A process that was killed gives ("killed", its exit code).
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_one, args=(rank, world, store, timeout, work, args, theirs))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside xdist's thread
                process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results: list[tuple[str, Any]] = []
        until = time.monotonic() + timeout + 30
        for pipe, process in zip(pipes, processes, strict=True):
            try:
                heard = pipe.poll(max(0.1, until - time.monotonic()))
                found = pickle.loads(pipe.recv_bytes()) if heard else ("silent", None)
            except EOFError:
                process.join(5)
                found = ("killed", process.exitcode)
            if found[0] != "done":
                until = min(until, time.monotonic() + 2 * len(processes))  # for those that hang
            results.append(found)
        for process in processes:
            process.join(5)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
    return results


def run(world: int, work: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """The results of all ranks; the first error of any of them."""
    results = launch(world, work, *args, timeout=timeout)
    for rank, (word, value) in enumerate(results):
        assert word == "done", f"rank {rank}: {word}: {value}"
    return [value for _, value in results]
