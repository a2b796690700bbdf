"""The driver: hands a plan's stacks out to a Ray cluster, begins again what is lost, and alone writes the tables.

A stack is what is scheduled: many runs on a GPU (or a share of one), one run on a CPU core. A worker that sees OUT (the
same machine, or a shared file system) keeps the stack there, exactly as the local engine does, and another goes on from
its checkpoint and ledger. One that does not see it charges every release with the desk, on the driver's disk, before it is
made, and sends its checkpoints there. What was lost with a node is then gone for good, also the evidence of what it was: it
stays charged, and batches and noise are new. A second run from the same seeds would be a replay only if every sum came out
the same to the bit, which cannot be known of a machine that is no more.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dpivon.durable.files import replace
from dpivon.errors import DpivonError, bad, need
from dpivon.study.cluster.attempt import TOKEN, Cargo, Ended, Task, attempt, pack
from dpivon.study.cluster.desk import Desk, Report
from dpivon.study.plan.data import load_data
from dpivon.study.plan.plan import Plan, PlannedRun
from dpivon.study.results.folder import finished, group, open_stack, record, recorded, retire
from dpivon.study.run.progress import Progress
from dpivon.study.run.runner import Engine, examples_of, progress_of
from dpivon.study.run.settings import MOST, Cluster, Settings

_ROOM = 256 * 2**20  # of the object store, beside the data


def ray_module(cluster: Cluster) -> Any:
    """Ray, or an error with the line that installs it. What it reads from the environment, it reads when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no network request
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what it will do by itself, and warns about
    if _address(cluster) is None:  # a cluster of one machine listens on loopback alone: this is how Ray calls it
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # 15 otherwise: a busy machine would starve it
    return need("ray", "ray")


def _address(cluster: Cluster) -> str | None:
    return cluster.address or os.environ.get("RAY_ADDRESS")


@contextmanager
def connected(cluster: Cluster, data_bytes: int) -> Iterator[Any]:
    """Ray, connected. What was connected before stays so; what is started here is stopped."""
    address = _address(cluster)
    if address is not None and address.startswith("ray://"):
        fix = "Run the command on a node of the cluster (`ray job submit`, or a shell there) with --address auto"
        raise bad("address", address, "is Ray Client's, from outside the cluster", fix)
    ray = ray_module(cluster)
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "dpivon"}
    if address is None:
        options |= {"num_cpus": cluster.workers, "object_store_memory": _ROOM + 2 * data_bytes}
        options |= {"include_dashboard": False}
    else:
        options["address"] = address
    with _own_signals():
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            if address is None:
                raise DpivonError(f"Ray cannot be started on this machine ({error}). Use the local engine.") from error
            fix = "Give the address that `ray start --head` printed, or auto on a node of the cluster"
            raise bad("address", address, f"no Ray cluster answers there ({error})", fix) from error
    try:
        yield ray
    finally:
        with _own_signals():
            ray.shutdown()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray replaces the process's handlers; put back those that were there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            with contextlib.suppress(TypeError):  # a handler that was not installed from Python
                signal.signal(number, handler)


_WAIT = 0.5  # seconds between looks at the desk
_REUSE = 1_000_000  # stacks that a process may train: Ray would begin a new one for every stack on a GPU


def on_ray(cluster: Cluster) -> Engine:
    """The engine that trains on this cluster: the same folder, table, display, signals and exit codes as the local one."""
    ray_module(cluster)
    return partial(_run_on_ray, cluster)


def _run_on_ray(
    cluster: Cluster, plan: Plan, out: Path, settings: Settings, stopped: Callable[[], int]
) -> dict[str, str]:
    data = load_data(plan, settings.data, torch.device("cpu"))
    cargo = pack(data)
    with connected(cluster, cargo.bytes) as ray:
        device, workers = _places(ray, settings, cluster)
        stacks = group(plan, out, _stack_size(plan, out, settings, device, workers), settings.only)
        with progress_of(plan, stacks, data.size, settings) as progress, _token(out) as token:
            driver = _Driver(ray, plan, out, settings, cluster, device, token, cargo, progress)
            try:
                return driver.run(stacks, workers, stopped)
            except ray.exceptions.RayError as error:
                raise DpivonError(
                    f"The Ray cluster failed the driver ({type(error).__name__}). The same command goes on: finished runs "
                    "have their rows, and the others their ledgers."
                ) from error
            finally:
                driver.close()


def _places(ray: Any, settings: Settings, cluster: Cluster) -> tuple[str, int]:
    """The kind of device, one for the whole study, and how many stacks at once.

    No more are handed out: for a task that waits in its queue Ray starts another process, which imports torch once more.
    """
    there = ray.cluster_resources()
    gpus = int(there.get("GPU", 0))
    if settings.device is not None and torch.device(settings.device).type == "cuda" and not gpus:
        raise bad("device", settings.device, "the cluster has no GPU", "Leave it out, or add a node that has one")
    device = "cuda" if gpus and settings.device != "cpu" else "cpu"
    hold = int(gpus * math.floor(1 / (cluster.gpus_per_stack or 1.0))) if device == "cuda" else int(there.get("CPU", 1))
    return device, cluster.workers or max(1, hold)


def _stack_size(plan: Plan, out: Path, settings: Settings, device: str, workers: int) -> int:
    """As many runs as a GPU takes, but no fewer stacks than there are GPUs to train them."""
    if settings.stack is not None or device == "cpu":
        return settings.stack or 1
    done = finished(out, plan)
    left = sum(run.id not in done and settings.only in run.id for run in plan.runs)
    return max(1, min(MOST, math.ceil(left / workers)))


@contextmanager
def _token(out: Path) -> Iterator[str]:
    """A file by which a worker knows whether it sees this very folder."""
    token = secrets.token_hex(16)
    replace(out / TOKEN, token.encode())
    try:
        yield token
    finally:
        (out / TOKEN).unlink(missing_ok=True)


@dataclass
class _Stack:
    """A stack that has no rows yet."""

    name: str
    runs: tuple[PlannedRun, ...]
    title: str
    total: float  # examples
    attempts: int = 0
    failures: int = 0  # in a row, without getting further
    furthest: float = 0.0  # examples that any attempt has seen
    shown: float = 0.0  # examples in the display
    not_before: float = 0.0
    heard: tuple[Report | None, float] = (None, 0.0)  # the last report, and when it was new
    silent: bool = False  # so long that its worker was ended


class _Driver:
    def __init__(
        self,
        ray: Any,
        plan: Plan,
        out: Path,
        settings: Settings,
        cluster: Cluster,
        device: str,
        token: str,
        cargo: Cargo,
        progress: Progress,
    ) -> None:
        self.ray, self.plan, self.out, self.settings, self.cluster = ray, plan, out, settings, cluster
        self.device, self.token, self.progress = device, token, progress
        self.hung_after = 1800.0 if cluster.hung_after is None else cluster.hung_after
        self.retries = 3 if cluster.retries is None else cluster.retries
        self.data, self.examples = ray.put(cargo), cargo.examples
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )  # it writes to OUT
        self.desk = ray.remote(num_cpus=0, scheduling_strategy=here)(Desk).remote(out / "stacks")
        gpus = (cluster.gpus_per_stack or 1.0) if device == "cuda" else 0
        self.attempt = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0, max_calls=_REUSE)(attempt)
        self.waiting: list[_Stack] = []
        self.running: dict[Any, _Stack] = {}
        self.failed: dict[str, str] = {}
        self.moved = False

    def close(self) -> None:
        """Leave nothing running: what is not ended in good order is ended like a lost worker."""
        for reference in self.running:
            self.ray.cancel(reference, force=True)
        self.ray.kill(self.desk)

    def run(
        self, stacks: list[tuple[Path, list[PlannedRun]]], workers: int, stopped: Callable[[], int]
    ) -> dict[str, str]:
        """Until every stack is finished or given up, or the study is stopped; what was given up, and why."""
        deadline = self.settings.deadline()
        for number, (folder, runs) in enumerate(stacks, 1):
            title = f"{self.plan.name} {number}/{len(stacks)}: {len(runs)}×b{runs[0].batch_size}"
            total = examples_of(self.plan, runs, self.examples)
            self.waiting.append(_Stack(folder.name, tuple(runs), title, total))
        stopping = False  # by the clock only when a block was made: every call gets on
        over: list[tuple[_Stack, Any]] = []
        while self.running or over or (self.waiting and not stopping):
            if not stopping and (stopped() or (self.moved and time.monotonic() > deadline)):
                stopping = True
                self._stop()
            while not stopping and len(self.running) < workers and (stack := self._next()) is not None:
                self._submit(stack)
            self._show([*self.running.values(), *(ended for ended, _ in over)])
            self._record()
            self._end_the_silent()
            for ended, reference in over:  # last: their workers have something new to do by now
                self._end(ended, reference, stopping)
            over = []
            if self.running:
                done, _ = self.ray.wait(list(self.running), timeout=_WAIT)
                over = [(self.running.pop(reference), reference) for reference in done]
            elif self.waiting:
                time.sleep(_WAIT / 5)  # only stacks that failed a moment ago are left
        return self.failed

    def _next(self) -> _Stack | None:
        ready = next((s for s in self.waiting if s.not_before <= time.monotonic()), None)
        if ready is not None:
            self.waiting.remove(ready)
        return ready

    def _submit(self, stack: _Stack) -> None:
        stack.attempts += 1
        stack.heard, stack.silent = (None, 0.0), False
        open_stack(self.out / "stacks" / stack.name, stack.runs)
        self.ray.get(self.desk.expect.remote(stack.name, stack.attempts))
        task = Task(
            self.plan, stack.runs, stack.name, stack.attempts, stack.title, self.out, self.token, self.settings,
            self.device, self.cluster.scratch, known=recorded(self.out, self.plan),
            paths=tuple(str(Path(path).absolute()) for path in ("", *sys.path)) if self.plan.architecture else (),
        )  # fmt: skip
        self.running[self.attempt.remote(task, self.data, self.desk)] = stack

    def _stop(self) -> None:
        """Attempts end at their next block; those that have not begun never do."""
        self.ray.get(self.desk.stop.remote())
        begun = self.ray.get(self.desk.poll.remote())
        for reference, stack in self.running.items():
            if stack.name not in begun:
                self.ray.cancel(reference)  # if it begins all the same, the desk turns it away

    def _end_the_silent(self) -> None:
        """A worker that hangs holds its stack, and would hold the study: it is ended, and its stack begun again."""
        for reference, stack in self.running.items():
            report, since = stack.heard
            if report is not None and not stack.silent and time.monotonic() - since > self.hung_after:
                stack.silent = True
                self.ray.cancel(reference, force=True)

    def _end(self, stack: _Stack, reference: Any, stopping: bool) -> None:
        errors = self.ray.exceptions
        try:
            ended: Ended = self.ray.get(reference)
        except errors.TaskCancelledError:
            ended = Ended()
        except errors.RayTaskError as error:  # raised outside of an attempt: dpivon is missing there, or another
            ended = Ended(error=f"{type(error.cause).__name__}: {error.cause}")
        except errors.RayError as error:
            ended = Ended(error=f"its worker was lost ({type(error).__name__})")
        if stack.silent and not ended.finished:
            ended = Ended(error=f"its worker said nothing for {self.hung_after:g} s and was ended")
        self.ray.get(self.desk.forget.remote(stack.name))
        for note in ended.notes:
            self.progress.say(f"{stack.title}: {note}")
        self._record()
        if ended.finished:
            retire(self.out / "stacks" / stack.name, self.out)
            self.progress.advance(stack.total - stack.shown, partial(str, stack.title))
            self.progress.say(f"{stack.title}: finished ({ended.where})")
        elif ended.error:
            self._failed(stack, ended, stopping)

    def _record(self) -> None:
        """Write down what workers have evaluated."""
        for results in self.ray.get(self.desk.collect.remote()):
            record(self.out, self.plan, results)

    def _failed(self, stack: _Stack, ended: Ended, stopping: bool) -> None:
        if stack.shown > stack.furthest:
            stack.furthest, stack.failures = stack.shown, 0
        stack.failures += 1
        reason = " ".join(ended.error.split())
        if ended.hopeless or stack.failures > self.retries:
            self.failed |= {run.id: f"{reason}, in attempt {stack.attempts}" for run in stack.runs}
            self.progress.say(f"{stack.title}: given up after {stack.attempts} attempts: {reason}")
        elif not stopping:
            stack.not_before = time.monotonic() + min(30.0, 0.5 * 2**stack.failures)
            self.waiting.append(stack)
            self.progress.say(f"{stack.title}: {reason}; it will be begun again from its last checkpoint")

    def _show(self, stacks: Sequence[_Stack]) -> None:
        reports: dict[str, Report] = self.ray.get(self.desk.poll.remote())
        at_work = f"{len(reports)} at work"
        if len(reports) < len(stacks):
            at_work += ", others wait to begin"
        for stack in stacks:
            report = reports.get(stack.name)
            if report is None or report.attempt != stack.attempts:
                continue
            if report != stack.heard[0]:
                stack.heard = report, time.monotonic()
            if not report.words:
                continue
            self.moved = True
            if stack.shown == 0.0:
                self.progress.skip(report.restored)
                stack.shown = report.restored
            step, stack.shown = report.done - stack.shown, report.done  # less than nothing where work was lost
            self.progress.advance(step, partial(" · ".join, (report.words, at_work)))
