"""SIGKILL of a run, a stack and a study, at random moments and in the middle of writes: each must end as if never killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

from children import Child, Task, releases, spent
from fault_run import STEPS, train
from moments import POINTS, TORN, Aim

from dpivon.durable.checkpoint import Rotation
from dpivon.durable.ledger import read
from dpivon.study.plan.plan import Plan, PlannedRun
from dpivon.study.results import table
from dpivon.study.run.runner import run_study
from dpivon.study.run.settings import Settings


def undisturbed(work: Path, task: Task = train) -> tuple[str, set[str], list[float], float]:
    """What a run ends with, all that is seen of it, its ε, and how long a step takes."""
    child = Child(work / f"undisturbed-{task.__name__}", task)
    child.after(1)
    began = time.monotonic()
    assert child.wait() == 0, child.error
    took = time.monotonic() - began
    return child.said.read_text(), child.seen, spent(child.folder), took / STEPS


class Judge:
    """Looks at a run after each of its deaths, and at its end."""

    def __init__(self, work: Path, task: Task) -> None:
        self.final, self.all_seen, self.cost, self.step_seconds = undisturbed(work, task)
        assert len(self.all_seen) == STEPS
        self.failures: list[str] = []
        self.at_release: list[int] = []  # of the run, when it was killed
        self.phases: Counter[str] = Counter()
        self.lost = self.equal = self.renewed = self.in_write = 0

    def died(self, child: Child, last: list[float]) -> list[float]:
        name, folder, charged = child.folder.name, child.folder, releases(child.folder)
        self.at_release.append(len(child.seen))
        self.phases[child.clock.phase] += 1
        if charged < len(child.seen):
            self.failures.append(f"{name}: {len(child.seen)} releases were seen, {charged} are charged")
        if not charged:
            return last
        known = spent(folder)
        if any(now < before for now, before in zip(known, last or known, strict=True)):
            self.failures.append(f"{name}: ε fell from {last} to {known}")
        self.in_write += bool(list(folder.glob(".*.tmp")))
        whole = Rotation(folder)
        if whole.files():
            if whole.read(tidy=False) is None:
                self.failures.append(f"{name}: no checkpoint loads")
            self.lost += charged - int(whole.files()[0].name[8:20])
        return known

    def ended(self, child: Child, code: int, torn: bool) -> None:
        name, folder = child.folder.name, child.folder
        if code != 0:
            self.failures.append(f"{name}: exit {code}: {child.error}")
            return
        if list(folder.glob(".release-*.tmp")):
            self.failures.append(f"{name}: half a checkpoint was left")
        if torn:  # a release of which nobody knows what it was made of is charged, and all is new after it
            self.renewed += 1
            if any(now < cost for now, cost in zip(spent(folder), self.cost, strict=True)):
                self.failures.append(f"{name}: ε = {spent(folder)} is less than {self.cost}")
            if releases(folder) < len(child.seen):
                self.failures.append(f"{name}: {len(child.seen)} releases were seen, {releases(folder)} are charged")
            return
        self.equal += 1
        if child.said.read_text() != self.final:
            self.failures.append(f"{name}: another model than the undisturbed run's")
        if child.seen != self.all_seen:
            self.failures.append(f"{name}: {len(child.seen ^ self.all_seen)} releases differ")
        if spent(folder) != self.cost:
            self.failures.append(f"{name}: ε = {spent(folder)} instead of {self.cost}")

    def report(self, tried: int, **more: object) -> dict:
        return {
            "tried": tried,
            "survived": tried - min(tried, len(self.failures)),
            "failures": self.failures,
            "killed_by_releases_made": _tenths(self.at_release, STEPS),
            "killed_while": dict(self.phases),
            "half_a_file_was_there": self.in_write,
            "runs_ended_bit_equal": self.equal,
            "runs_ended_with_new_noise_and_more_charged": self.renewed,
            "releases_lost": self.lost,
            "epsilon": self.cost,
            **more,
        }


def _tenths(at: list[int], steps: int) -> list[int]:
    """How many fell into each tenth of the run."""
    counts = Counter(min(9, 10 * n // steps) for n in at)
    return [counts[i] for i in range(10)]


def kills(work: Path, task: Task, times: int, rng: random.Random) -> dict:
    """SIGKILL from outside, each at a random release after the process's first, and a random moment of the step after it.

    Every run is killed once or twice, and must end as if nothing had been.
    """
    judge, killed, number = Judge(work, task), 0, 0
    while killed < times:
        folder, last, code = work / f"killed-{task.__name__}-{number}", [], -signal.SIGKILL
        number += 1
        deaths = rng.randint(1, 2)  # the second in what was left
        while code == -signal.SIGKILL:
            child = Child(folder, task)
            child.after(1)
            if killed < times and deaths:
                deaths -= 1
                child.after(rng.randint(1, max(1, STEPS - len(child.seen))), rng.uniform(0.0, judge.step_seconds))
                child.kill()
            code = child.wait()
            if code == -signal.SIGKILL:
                killed += 1
                last = judge.died(child, last)
                if child.shown == 0:
                    judge.failures.append(f"{folder.name}: killed before its first release")
        judge.ended(child, code, torn=False)
    return judge.report(killed, runs=number)


def aimed_kills(work: Path, task: Task, each: int, rng: random.Random) -> dict:
    """SIGKILL at every point of every write, each of a run of its own, at a random one of its writes."""
    judge, points = Judge(work, task), Counter()
    for point in POINTS:
        for i in range(each):
            folder = work / f"aimed-{task.__name__}-{POINTS.index(point)}-{i}"
            most = 2 if "ledger" in point else STEPS // 8 if "checkpoint" in point else STEPS
            child = Child(folder, task, aim=Aim(point, rng.randint(1, most)))
            code = child.wait()
            if code != -signal.SIGKILL:
                judge.failures.append(f"{folder.name}: {point}: was not reached; exit {code} {child.error}")
                continue
            points[point] += 1
            judge.died(child, [])
            child = Child(folder, task, may_warn=point == TORN)
            judge.ended(child, child.wait(), torn=point == TORN)
    return judge.report(sum(points.values()), points=dict(points))


def study_kills(work: Path, times: int, rng: random.Random) -> dict:
    """A study killed at random moments: no row twice, none missing, and the table of one that was never disturbed."""
    run = {"method": "dp-sgd", "batch_size": 64, "noise_multiplier": 1.0, "max_grad_norm": 1.0, "seed": 0, "lr": 0.5}
    runs = (PlannedRun(**run), PlannedRun(**run | {"method": "dp-ivon-gradsq", "batch_size": 128}))
    plan = Plan("kills", "digits", "small", "final", 1, 1e-4, 2, 0, runs)

    def begin(out: Path) -> int:
        pid = os.fork()
        if pid == 0:
            code = 3
            try:
                warnings.simplefilter("error")
                settings = Settings(quiet=True, block=4, device="cpu", checkpoint_seconds=0.1)
                code = run_study(plan, out, settings).exit_code
            except BaseException:
                (work / "study-error").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        return pid

    def rows(out: Path) -> list[dict]:
        found = sorted(table.read(out / "runs.csv"), key=lambda r: r["id"])
        return [{k: v for k, v in row.items() if k != "seconds"} for row in found]

    def made(out: Path) -> int:
        return sum(read(path).releases for path in out.rglob("ledger.jsonl"))

    def follow(pid: int, out: Path, until: int) -> None:
        while made(out) < until and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.002)

    pid = begin(work / "study")
    follow(pid, work / "study", 1)
    began = time.monotonic()
    os.waitpid(pid, 0)
    took, whole, total = time.monotonic() - began, rows(work / "study"), made(work / "study")
    killed, number, equal, at, failures = 0, 0, 0, [], []
    while killed < times:
        out, last = work / f"study-{number}", 0
        number += 1
        code = -1
        while code != 0:
            pid = begin(out)
            follow(pid, out, made(out) + 1)  # the first release that is its own
            if killed < times:
                follow(pid, out, made(out) + rng.randrange(max(1, total - made(out))))
                time.sleep(rng.uniform(0.0, took / total))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code == -signal.SIGKILL:
                killed += 1
                at.append(made(out))
            if made(out) < last:
                failures.append(f"{out.name}: {made(out)} releases are charged, and {last} were")
            last = made(out)
            if code > 0:
                failures.append(f"exit {code}: {(work / 'study-error').read_text()[-300:]}")
                break
        if rows(out) == whole:
            equal += 1
        else:
            failures.append(f"{out.name}: another table")
    return {
        "tried": killed,
        "survived": killed - min(killed, len(failures)),
        "failures": failures,
        "killed_by_releases_made": _tenths(at, total),
        "releases_of_a_whole_study": total,
        "studies": number,
        "studies_ended_equal": equal,
    }
