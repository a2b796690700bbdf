"""The fault table with real processes: killed, stopped, out of disk, two at once, with damaged files. Counts to JSON.

    python tests/faults/fault_campaign.py --kills 50 --aimed 2 --flips 200 --out tests/reliability/faults.json

Children are forked from this process, which has the libraries loaded: the kill then falls into training and not into
imports. Every child is a process of its own and is killed as such (children.py); moments.py says when.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from children import Child, releases, spent
from fault_run import STEPS, train, train_fit, train_stack
from kills import aimed_kills, kills, study_kills, undisturbed

from dpivon.durable.checkpoint import Rotation
from dpivon.durable.ledger import read
from dpivon.errors import DpivonError, PrivacyError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


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
    parser.add_argument("--only", default="", help="run this entry alone; the others stay as they are in --out")
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
        fits = random.Random(given.seed + 1)
        entries: dict[str, Callable[[], dict]] = {
            "SIGKILL at a random moment of training": lambda: kills(work, train, given.kills, rng),
            "SIGKILL at a random moment of a stack": lambda: kills(work, train_stack, given.kills // 2, rng),
            "SIGKILL at a random moment of fit(out=…)": lambda: kills(work, train_fit, 2 * given.kills // 5, fits),
            "SIGKILL in the middle of a write": lambda: aimed_kills(work, train, given.aimed, rng),
            "SIGKILL in the middle of a write of a stack": lambda: aimed_kills(work, train_stack, given.aimed, rng),
            "SIGKILL of a study": lambda: study_kills(work, given.kills // 3, rng),
            "SIGTERM and Ctrl-C": lambda: signals(work),
            "two processes on one folder": lambda: two_processes(work),
            "bit flipped or end cut off": lambda: damaged(work, given.flips, rng),
            "disk full": lambda: full_disk(work),
        }
        ran = "python tests/faults/fault_campaign.py " + " ".join(sys.argv[1:])
        before = json.loads(given.out.read_text()) if given.only else {"command": ran, "faults": {}}
        rows = {name: entries[name]() if given.only in ("", name) else before["faults"][name] for name in entries}
        if given.only:
            rows[given.only]["command"] = ran  # this entry's own; the others are of the file's command
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report = {
        "command": before["command"],
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
