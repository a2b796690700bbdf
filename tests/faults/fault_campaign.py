"""The fault table with real processes: killed, stopped, out of disk, two at once, with damaged files. Counts to JSON.

    python tests/faults/fault_campaign.py --kills 50 --flips 200 --out results/reliability/faults.json

Children are forked from this process, which has the libraries loaded: the kill then falls into training and not into
imports. Every child is a process of its own and is killed as such.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
from fault_run import DELTA, STEPS, train

from dpivon.durable.checkpoint import Rotation
from dpivon.durable.ledger import read
from dpivon.errors import DpivonError, PrivacyError
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.accounting.recorded import history
from dpivon.study import table
from dpivon.study.plan import Plan, PlannedRun
from dpivon.study.runner import run_study
from dpivon.study.settings import Settings

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Child:
    """A run in a process of its own."""

    def __init__(self, folder: Path, **options) -> None:
        self.folder, self.said = folder, folder.with_suffix(".said")
        self.witness = folder.with_suffix(".seen")
        self.pid = os.fork()
        if self.pid == 0:
            code = 3
            try:
                limit = options.pop("limit", None)
                if limit:
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                warnings.simplefilter("error")
                self.said.write_text(train(folder, self.witness, **options))
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

    @property
    def error(self) -> str:
        path = self.said.with_suffix(".error")
        return path.read_text() if path.exists() else ""


def releases(folder: Path) -> int:
    path = folder / "ledger.jsonl"
    return read(path).releases if path.exists() else 0


def spent(folder: Path) -> float:
    return epsilon(history(read(folder / "ledger.jsonl"), 0), DELTA)


def seen(child: Child) -> set[str]:
    return set(child.witness.read_text().split()) if child.witness.exists() else set()


def undisturbed(work: Path) -> tuple[str, set[str], float, float]:
    began = time.monotonic()
    child = Child(work / "undisturbed")
    assert child.wait() == 0, child.error
    took = time.monotonic() - began
    return child.said.read_text(), seen(child), spent(child.folder), took


def kills(work: Path, times: int, rng: random.Random) -> dict:
    """SIGKILL at random moments, again and again, until so many processes have died; every run must end as if nothing was."""
    final, all_seen, cost, took = undisturbed(work)
    assert len(all_seen) == STEPS
    killed, failures, lost_total, ended, during_write, in_training = 0, [], 0, 0, 0, 0
    number = 0
    while killed < times:
        folder, last = work / f"killed-{number}", 0.0
        number += 1
        while True:
            child = Child(folder)
            before = child.witness.stat().st_size if child.witness.exists() else 0
            time.sleep(rng.uniform(0.0, 0.9 * took))
            child.kill()
            code = child.wait()
            made = child.witness.exists() and child.witness.stat().st_size > before
            in_training += code == -signal.SIGKILL and made
            if not (folder / "ledger.jsonl").exists():
                killed += code == -signal.SIGKILL
                if seen(child):
                    failures.append(f"{folder.name}: something was seen, and there is no ledger")
                continue
            known = spent(folder)
            if known < last:
                failures.append(f"{folder.name}: ε fell from {last} to {known}")
            last = known
            if releases(folder) < len(seen(child)):
                failures.append(f"{folder.name}: {len(seen(child))} releases were seen, {releases(folder)} are charged")
            if code == -signal.SIGKILL:
                killed += 1
                during_write += bool(list(folder.glob(".*.tmp")))
                whole = Rotation(folder)
                if whole.files() and whole.read(tidy=False) is None:
                    failures.append(f"{folder.name}: no checkpoint loads")
                if whole.files():
                    at = int(whole.files()[0].name[8:20])
                    lost_total += releases(folder) - at
                if killed < times:
                    continue
                child = Child(folder)  # the last one is left alone
                code = child.wait()
            if code != 0:
                failures.append(f"{folder.name}: exit {code}: {child.error}")
            else:
                ended += 1
                if child.said.read_text() != final:
                    failures.append(f"{folder.name}: another model than the undisturbed run's")
                if seen(child) != all_seen:
                    failures.append(f"{folder.name}: {len(seen(child) - all_seen)} other releases were seen")
                if list(folder.glob(".*.tmp")):
                    failures.append(f"{folder.name}: half a file was left")
                if spent(folder) != cost:
                    failures.append(f"{folder.name}: ε = {spent(folder)} instead of {cost}")
            break
    return {
        "tried": killed,
        "survived": killed - min(killed, len(failures)),
        "failures": failures,
        "killed_after_it_had_released_something": in_training,
        "runs_ended_bit_equal": ended,
        "releases_lost_and_repeated": lost_total,
        "killed_in_the_middle_of_a_checkpoint": during_write,
        "epsilon": cost,
    }


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

    began = time.monotonic()
    os.waitpid(begin(work / "study"), 0)
    took, whole = time.monotonic() - began, rows(work / "study")
    killed, number, equal, in_training, failures = 0, 0, 0, 0, []

    def made(out: Path) -> int:
        return sum(read(path).releases for path in out.rglob("ledger.jsonl"))

    while killed < times:
        out = work / f"study-{number}"
        number += 1
        code = -1
        while code != 0:
            before, pid = made(out), begin(out)
            if killed < times:
                time.sleep(rng.uniform(0.0, 0.9 * took))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            killed += code == -signal.SIGKILL
            in_training += code == -signal.SIGKILL and made(out) > before
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
        "killed_after_it_had_released_something": in_training,
        "studies": number,
        "studies_ended_equal": equal,
    }


def signals(work: Path) -> dict:
    """SIGTERM and Ctrl-C: a checkpoint, exit 143 and 130, and the same run afterwards."""
    final, _, cost, _ = undisturbed(work / "s")
    failures = []
    for number, wanted in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        child = Child(work / f"signal-{number}")
        deadline = time.monotonic() + 60
        while len(seen(child)) < 5 and time.monotonic() < deadline:
            time.sleep(0.005)
        child.kill(number)
        code = child.wait()
        made = releases(child.folder)
        saved = int(Rotation(child.folder).files()[0].name[8:20])
        if code != wanted or saved != made or made >= STEPS:
            failures.append(f"signal {number}: exit {code}, checkpoint at {saved} of {made}")
        again = Child(child.folder)
        if again.wait() != 0 or again.said.read_text() != final or spent(child.folder) != cost:
            failures.append(f"signal {number}: the run did not end as it would have. {again.error}")
    return {"tried": 2, "survived": 2 - len(failures), "failures": failures}


def two_processes(work: Path) -> dict:
    """The second process on one folder gets an error and changes nothing."""
    folder, failures = work / "two", []
    first = Child(folder, hold=False)
    deadline = time.monotonic() + 60
    while len(seen(first)) < 3 and time.monotonic() < deadline:
        time.sleep(0.002)
    first.kill(signal.SIGSTOP)
    before = {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}
    second = Child(folder)
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
    child = Child(folder)
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
    child = Child(folder, save_every=2, limit=limit)
    # What is said goes to the full disk as well; the exit code is what counts.
    code = child.wait()
    if code == 0:
        failures.append("the disk was never full")
    if Rotation(folder).files() and Rotation(folder).read() is None:
        failures.append("no checkpoint loads")
    known = spent(folder) if releases(folder) else 0.0
    if releases(folder) < len(seen(child)):
        failures.append("a release is not in the ledger")
    if list(folder.glob(".*.tmp")):
        failures.append("half a file was left")
    (disk / "ballast").unlink(missing_ok=True)
    if limit is None:
        subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
    again = Child(folder)
    if again.wait() != 0 or again.said.read_text() != final:
        failures.append(f"with room again it did not end as it would have: {again.error}")
    elif not known <= spent(folder) == cost:
        failures.append(f"ε = {spent(folder)} instead of {cost}")
    return {"tried": 1, "survived": 0 if failures else 1, "failures": failures, "exit_when_full": code}


def pytest_rows() -> dict:
    """Rows of the table that have tests of their own, run as they are."""
    rows = {
        "stop and resume at every step": ["tests/durable/test_resume.py", "tests/test_stacked_checkpoint.py"],
        "same seed in both processes": ["tests/durable/test_resume.py::test_the_same_noise_never_meets_two_sums"],
        "NaN or Inf example": ["tests/privacy/test_bookkeeping.py::test_a_non_finite_example_contributes_zero"],
        "out of memory on a micro-batch": ["tests/faults/test_retry.py"],
        "exception inside sampled_params": [
            "tests/privacy/test_pitfalls.py::test_an_exception_inside_sampled_params_restores_the_mean",
            "tests/optim/test_ivon_optimizer.py::test_weights_are_restored_exactly_whatever_happens_inside",
        ],
        "data file short or flipped": [
            "tests/data/test_cifar10.py::test_one_wrong_byte_is_refused",
            "tests/data/test_fashion_mnist.py::test_damage_is_refused_with_words",
        ],
        "a sweep killed": [
            "tests/study/test_run.py::test_killed_for_good_on_a_bare_machine_and_resumed",
            "tests/study/test_run.py::test_killed_while_finishing_nothing_stands_twice",
            "tests/study/test_run.py::test_a_crash_anywhere_changes_nothing",
            "tests/study/test_run.py::test_two_processes_never_run_one_study",
        ],
        "a pickle with code in it": [
            "tests/durable/test_published.py::test_a_pickle_in_the_place_of_a_checkpoint_is_not_executed",
            "tests/privacy/test_pitfalls.py::test_a_checkpoint_with_code_in_it_is_refused_and_not_executed",
        ],
    }
    out = {}
    for name, tests in rows.items():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        words = done.stdout.splitlines()[-1].replace(",", "").split()
        counts = {word: int(words[i - 1]) for i, word in enumerate(words) if word in ("passed", "failed", "error")}
        passed = counts.get("passed", 0)
        tried = sum(counts.values())
        out[name] = {
            "tried": tried,
            "survived": passed,
            "failures": [] if done.returncode == 0 else [done.stdout[-400:]],
        }
        out[name]["tests"] = tests
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--flips", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", action="store_true", help="also count the rows that are ordinary tests")
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
            "SIGKILL at a random moment": kills(work, given.kills, rng),
            "SIGKILL of a study": study_kills(work, given.kills // 3, rng),
            "SIGTERM and Ctrl-C": signals(work),
            "two processes on one folder": two_processes(work),
            "bit flipped or end cut off": damaged(work, given.flips, rng),
            "disk full": full_disk(work),
        }
        if given.tests:
            rows |= pytest_rows()
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
