"""Run a plan in this process: stacks of runs one after the other, each continued from its checkpoint, none repeated."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dpivon.errors import bad, check_choice, check_number, check_whole
from dpivon.study.plan.data import load_data
from dpivon.study.plan.plan import Plan, PlannedRun, steps_of
from dpivon.study.results.folder import alone, claim, finished, group, record, recorded, retire, under_way
from dpivon.study.run.progress import Progress
from dpivon.study.run.robustness import make_conditions
from dpivon.study.run.settings import MOST, Cluster, Outcome, Settings
from dpivon.study.run.work import Work, clear, fitting

ENGINES = ("local", "ray")


def run_study(plan: Plan, out: Path, settings: Settings) -> Outcome:
    """Run what is not finished yet. SIGINT or SIGTERM stop at the next block, with a checkpoint."""
    device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_settings(settings)
    out.mkdir(parents=True, exist_ok=True)
    with alone(out), stop_signals() as stopped:
        deadline = time.monotonic() + 60 * settings.minutes if settings.minutes else float("inf")
        claim(out, plan)
        if len(finished(out, plan)) == len(plan.runs):
            under_way(plan, out)  # nothing is, once it is cleared up
            return Outcome(len(plan.runs), len(plan.runs))
        data = load_data(plan, settings.data, device)
        conditions = make_conditions(plan, data, settings.data)  # before anything trains: what is missing is missed now
        stacks = group(plan, out, settings.stack or (MOST if device.type == "cuda" else 1), settings.only)

        def stop(work: Work | None = None) -> bool:
            """A signal stops at once, the clock only who has got on: every call does."""
            return bool(stopped()) or (time.monotonic() > deadline and (work is None or work.got_on))

        with progress_of(plan, stacks, data.size, settings) as progress:
            for number, (folder, runs) in enumerate(stacks, 1):
                if number > 1 and stop():  # the first makes at least one block: every call gets on
                    break
                title = f"{plan.name} {number}/{len(stacks)}: {len(runs)}×b{runs[0].batch_size}"
                with fitting(runs, folder):
                    known = recorded(out, plan)
                    work = Work(plan, runs, folder, data, conditions, settings, device, progress, title, known=known)
                    with closing(work.kept):
                        if not work.train(stop):
                            break
                        if not work.evaluate(partial(record, out, plan), partial(stop, work)):
                            break
                retire(folder, out)
                del work
                clear(device)
    return outcome_of(plan, out, settings, stopped())


def outcome_of(
    plan: Plan, out: Path, settings: Settings, signal: int, failed: Mapping[str, str] | None = None
) -> Outcome:
    """What came of a call: a part of the plan, where only that was asked for, may be all there is to do."""
    done = finished(out, plan)
    left = sum(settings.only in run.id and run.id not in done for run in plan.runs)
    return Outcome(len(done), len(plan.runs), signal, failed or {}, left)


def check_settings(settings: Settings) -> None:
    if settings.stack is not None:
        check_whole("stack", settings.stack, "Give the number of runs to train at once", at_least=1)
    if settings.minutes is not None:
        check_number("minutes", settings.minutes, "Give the time after which to stop", above=0.0)


def progress_of(
    plan: Plan, stacks: Sequence[tuple[Path, Sequence[PlannedRun]]], examples: int, settings: Settings
) -> Progress:
    """A display of all that was asked for, with what is not in these stacks as done."""
    wanted = [r for r in plan.runs if settings.only in r.id]
    total = float(sum(steps_of(r, plan.epochs, examples) * r.batch_size for r in wanted))
    left = float(sum(steps_of(r, plan.epochs, examples) * r.batch_size for _, runs in stacks for r in runs))
    return Progress(total, total - left, runs=sum(len(runs) for _, runs in stacks), quiet=settings.quiet)


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


def run_with(engine: str, plan: Plan, out: Path, settings: Settings, cluster: Cluster) -> Outcome:
    """Run a plan; Ray is imported only if it was asked for."""
    check_choice("engine", engine, ENGINES, "Name an engine")
    if engine == "ray":
        from dpivon.study.cluster.engine import run_on_ray

        return run_on_ray(plan, out, settings, cluster)
    for name, value in vars(cluster).items():
        if value is not None:
            raise bad(name, value, "requires --engine ray", "Add it, or leave this out")
    return run_study(plan, out, settings)
