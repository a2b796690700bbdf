"""The fault table with real processes: killed, stopped, out of disk, two at once, with damaged files. Counts to JSON.

    python tests/faults/fault_campaign.py --kills 50 --aimed 2 --flips 200 --out results/reliability/faults.json

Children are forked from this process, which has the libraries loaded: the kill then falls into training and not into
imports. Every child is a process of its own and is killed as such (children.py); moments.py says when.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch
from children import Child, Task, releases, spent
from fault_run import STEPS, train, train_stack
from moments import POINTS, TORN, Aim

from dpivon.durable.checkpoint import Rotation
from dpivon.durable.ledger import read
from dpivon.errors import DpivonError, PrivacyError
from dpivon.study import table
from dpivon.study.plan import Plan, PlannedRun
from dpivon.study.runner import Settings, run_study

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


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


def signals(work: Path) -> dict:
    """SIGTERM and Ctrl-C: a checkpoint, exit 143 and 130, and the same run afterwards."""
    final, _, cost, _ = undisturbed(work / "s")
    failures = []
    for number, wanted in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        child = Child(work / f"signal-{number}", train)
        child.after(5)
        child.kill(number)
        code = child.wait()
        made = releases(child.folder)
        saved = int(Rotation(child.folder).files()[0].name[8:20])
        if code != wanted or saved != made or made >= STEPS:
            failures.append(f"signal {number}: exit {code}, checkpoint at {saved} of {made}")
        again = Child(child.folder, train)
        if again.wait() != 0 or again.said.read_text() != final or spent(child.folder) != cost:
            failures.append(f"signal {number}: the run did not end as it would have. {again.error}")
    return {"tried": 2, "survived": 2 - len(failures), "failures": failures}


def two_processes(work: Path) -> dict:
    """The second process on one folder gets an error and changes nothing."""
    folder, failures = work / "two", []
    first = Child(folder, train)
    first.after(3)
    first.kill(signal.SIGSTOP)
    before = {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}
    second = Child(folder, train)
    code = second.wait()
    after = {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}
    if code == 0 or "another process is using it" not in second.error:
        failures.append(f"exit {code}: {second.error}")
    if before != after:
        failures.append("the second changed something")
    first.kill(signal.SIGCONT)
    if first.wait() != 0:
        failures.append(f"the first failed: {first.error}")
    return {"tried": 1, "survived": 0 if failures else 1, "failures": failures}


def damaged(work: Path, flips: int, rng: random.Random) -> dict:
    """One bit flipped, or the end cut off, at random places of the newest checkpoint and of the ledger."""
    folder = work / "damaged"
    child = Child(folder, train)
    assert child.wait() == 0, child.error
    newest, before = Rotation(folder).files()[:2]
    whole, good = newest.read_bytes(), json.dumps(_plain(Rotation(folder).read()))
    found = unchanged = 0
    failures = []
    for i in range(flips):
        newest.write_bytes(_damage(whole, rng, cut=i % 4 == 0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                state = Rotation(folder).read()
            except DpivonError as error:
                failures.append(str(error))
                continue
        if caught and newest.name in str(caught[0].message) and before.name in str(caught[0].message):
            found += 1
            newest.with_suffix(".damaged").unlink()
        elif json.dumps(_plain(state)) == good:
            unchanged += 1
        else:
            failures.append("a damaged checkpoint was loaded")
        newest.write_bytes(whole)
    ledger = folder / "ledger.jsonl"
    whole, known = ledger.read_bytes(), releases(folder)
    refused = counted_up = counted_same = 0
    for i in range(flips):
        cut = i % 4 == 0
        # Cut inside the last line: at whole lines the checkpoint notices, which test_resume.py shows.
        content = whole[: -rng.randrange(1, len(whole.splitlines()[-1]))] if cut else _damage(whole, rng, cut=False)
        ledger.write_bytes(content)
        try:
            now = read(ledger).releases
        except PrivacyError:
            refused += 1
        else:
            counted_up += now > known
            counted_same += now == known
            if now < known:
                failures.append(f"a damaged ledger counts {now} of {known}")
    ledger.write_bytes(whole)
    return {
        "tried": 2 * flips,
        "survived": 2 * flips - len(failures),
        "failures": failures[:10],
        "checkpoints": {"found_and_fell_back": found, "damage_without_effect": unchanged},
        "ledgers": {"refused": refused, "counted_more": counted_up, "counted_the_same": counted_same},
    }


def _damage(content: bytes, rng: random.Random, *, cut: bool) -> bytes:
    if cut:
        return content[: rng.randrange(len(content))]
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def full_disk(work: Path) -> dict:
    """A file system of 64 KiB that fills up in the middle of training: old files intact, an error, and on with more room.

    In a mount namespace of its own, so that nothing of it is seen outside.
    """
    inside = [sys.executable, str(Path(__file__).resolve()), "--inside-small-disk", str(work / "small")]
    (work / "small").mkdir()
    mount = f'mount -t tmpfs -o size=64k none "{work / "small"}" && exec "$@"'
    found = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *inside],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode == 0:
        return {"how": "tmpfs of 64 KiB"} | json.loads(found.stdout.splitlines()[-1])
    # No namespaces here: the size of files is limited instead.
    return {"how": f"RLIMIT_FSIZE (no tmpfs: {found.stderr.strip()[-200:]})"} | _fill(work / "small", work, limit=6000)


def _fill(disk: Path, work: Path, limit: int | None = None) -> dict:
    final, _, cost, _ = undisturbed(work)
    failures = []
    folder = disk / "run"
    if limit is None:  # leave room for the ledger and one checkpoint, not for all of them
        (disk / "ballast").write_bytes(b"\0" * 20_000)
    child = Child(folder, train, save_every=2, limit=limit)
    # What is said goes to the full disk as well; the exit code is what counts.
    code = child.wait()
    if code == 0:
        failures.append("the disk was never full")
    if Rotation(folder).files() and Rotation(folder).read() is None:
        failures.append("no checkpoint loads")
    known = spent(folder) if releases(folder) else [0.0]
    if releases(folder) < len(child.seen):
        failures.append("a release is not in the ledger")
    if list(folder.glob(".*.tmp")):
        failures.append("half a file was left")
    (disk / "ballast").unlink(missing_ok=True)
    if limit is None:
        subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
    again = Child(folder, train)
    if again.wait() != 0 or again.said.read_text() != final:
        failures.append(f"with room again it did not end as it would have: {again.error}")
    elif not known <= spent(folder) == cost:
        failures.append(f"ε = {spent(folder)} instead of {cost}")
    return {"tried": 1, "survived": 0 if failures else 1, "failures": failures, "exit_when_full": code}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--aimed", type=int, default=1, help="deaths at each point of a write")
    parser.add_argument("--flips", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside-small-disk", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    work = Path(tempfile.mkdtemp(prefix="faults-"))
    (work / "s").mkdir()
    try:
        if given.inside_small_disk:
            print(json.dumps(_fill(given.inside_small_disk, work)))
            return 0
        rng = random.Random(given.seed)
        rows = {
            "SIGKILL at a random moment of training": kills(work, train, given.kills, rng),
            "SIGKILL at a random moment of a stack": kills(work, train_stack, given.kills // 2, rng),
            "SIGKILL in the middle of a write": aimed_kills(work, train, given.aimed, rng),
            "SIGKILL in the middle of a write of a stack": aimed_kills(work, train_stack, given.aimed, rng),
            "SIGKILL of a study": study_kills(work, given.kills // 3, rng),
            "SIGTERM and Ctrl-C": signals(work),
            "two processes on one folder": two_processes(work),
            "bit flipped or end cut off": damaged(work, given.flips, rng),
            "disk full": full_disk(work),
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report = {
        "command": "python tests/faults/fault_campaign.py " + " ".join(sys.argv[1:]),
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "tried": sum(row["tried"] for row in rows.values()),
        "survived": sum(row["survived"] for row in rows.values()),
        "faults": rows,
    }
    text = json.dumps(report, indent=1, ensure_ascii=False)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + "\n")
    print(text)
    return 0 if report["survived"] == report["tried"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
