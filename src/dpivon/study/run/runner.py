"""Run a plan in this process: stacks of runs one after the other, each continued from its checkpoint, none repeated."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dpivon.errors import bad, check_choice
from dpivon.study.plan.data import load_data
from dpivon.study.plan.plan import Plan, PlannedRun, steps_of
from dpivon.study.results.folder import alone, claim, finished, group, record, recorded, retire, under_way
from dpivon.study.run.progress import Progress
from dpivon.study.run.settings import MOST, Cluster, Outcome, Settings
from dpivon.study.run.work import Work, clear, fitting

ENGINES = ("local", "ray")
#: Trains what is not finished, until the last argument names a signal; returned are the runs given up, and why.
Engine = Callable[[Plan, Path, Settings, Callable[[], int]], dict[str, str]]


def run_study(plan: Plan, out: Path, settings: Settings) -> Outcome:
    """Run what is not finished yet. SIGINT or SIGTERM stop at the next block, with a checkpoint."""
    return _run(_run_here, plan, out, settings)


def run_with(engine: str, plan: Plan, out: Path, settings: Settings, cluster: Cluster) -> Outcome:
    """Run a plan; Ray is imported only if it was asked for."""
    check_choice("engine", engine, ENGINES, "Name an engine")
    if engine == "ray":
        from dpivon.study.cluster.engine import on_ray

        return _run(on_ray(cluster), plan, out.absolute(), settings)  # workers have another working directory
    for name, value in vars(cluster).items():
        if value is not None:
            raise bad(name, value, "requires --engine ray", "Add it, or leave this out")
    return run_study(plan, out, settings)


def _run(engine: Engine, plan: Plan, out: Path, settings: Settings) -> Outcome:
    out.mkdir(parents=True, exist_ok=True)
    with alone(out), stop_signals() as stopped:
        claim(out, plan)
        if len(finished(out, plan)) == len(plan.runs):
            under_way(plan, out)  # nothing is, once it is cleared up
            return Outcome(len(plan.runs), len(plan.runs))
        failed, done = engine(plan, out, settings, stopped), finished(out, plan)
        left = sum(settings.only in run.id and run.id not in done for run in plan.runs)
        return Outcome(len(done), len(plan.runs), stopped(), failed, left)


def _run_here(plan: Plan, out: Path, settings: Settings, stopped: Callable[[], int]) -> dict[str, str]:
    device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    deadline = settings.deadline()
    data = load_data(plan, settings.data, device)
    stacks = group(plan, out, settings.stack or (MOST if device.type == "cuda" else 1), settings.only)

    def stop(work: Work | None = None) -> bool:
        """Signals stop the run immediately; the time limit applies once progress was made."""
        return bool(stopped()) or (time.monotonic() > deadline and (work is None or work.got_on))

    with progress_of(plan, stacks, data.size, settings) as progress:
        for number, (folder, runs) in enumerate(stacks, 1):
            if number > 1 and stop():  # the first makes at least one block: every call gets on
                break
            title = f"{plan.name} {number}/{len(stacks)}: {len(runs)}×b{runs[0].batch_size}"
            with fitting(runs, folder):
                known = recorded(out, plan)
                work = Work(plan, runs, folder, data, settings, device, progress, title, known=known)
                with closing(work.kept):
                    if not (work.train(stop) and work.evaluate(partial(record, out, plan), partial(stop, work))):
                        break
            retire(folder, out)
            del work
            clear(device)
    return {}


def examples_of(plan: Plan, runs: Iterable[PlannedRun], examples: int) -> float:
    """How many examples the runs are trained on in all."""
    return float(sum(steps_of(run, plan.epochs, examples) * run.batch_size for run in runs))


def progress_of(
    plan: Plan, stacks: Sequence[tuple[Path, Sequence[PlannedRun]]], examples: int, settings: Settings
) -> Progress:
    """A display of all that was asked for, with what is not in these stacks as done."""
    runs = [run for _, members in stacks for run in members]
    total = examples_of(plan, (run for run in plan.runs if settings.only in run.id), examples)
    return Progress(total, total - examples_of(plan, runs, examples), runs=len(runs), quiet=settings.quiet)


@contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """The first SIGINT or SIGTERM asks to stop at the next block; the second SIGINT interrupts as usual."""
    asked = [0]
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return

    def ask(number: int, frame: Any) -> None:
        if asked[0] and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked[0] = asked[0] or number

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
