"""A folder of results: which runs have their row, which stacks are under way, and how one becomes the other.

OUT/study.json           the plan that the results belong to
OUT/defaults.json        what its methods did where the plan says nothing
OUT/runs.csv             one row per finished run (tuning.csv for tuning)
OUT/diagnostics.csv      IVON's curvature over training
OUT/stacks/NAME/         of stacks under way: their runs, ledger and checkpoints, which sums temperatures were asked of, and
                         what they are doing; gone when all their runs have their rows
OUT/ledgers/DIGEST/      of finished ones: the ledger, which names its runs
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpivon.durable.files import Lock, replace
from dpivon.durable.ledger import Record, read
from dpivon.errors import StorageError, bad
from dpivon.methods import METHODS
from dpivon.privacy.accounting.recorded import LEDGER, STUDY
from dpivon.study.plan.plan import Plan, PlannedRun, read_plan
from dpivon.study.results import table
from dpivon.terminal import is_formula

LEDGERS, RUNS, DIAGNOSTICS = "ledgers", "runs.json", "diagnostics.csv"
_SAID = re.compile(r"-sigma(.+?)-C(.+?)-lr")  # what a run's id says of its releases


@dataclass(frozen=True)
class Results:
    """What evaluated runs leave: rows of both tables, and posteriors' files by the run's id where they are kept."""

    rows: Sequence[table.Row]
    diagnostics: Sequence[table.Row]
    posteriors: Mapping[str, bytes] = field(default_factory=dict)


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Two processes on one folder would repeat each other's runs."""
    lock = Lock(out / ".lock", str(out))
    try:
        yield
    finally:
        lock.release()


def finished(out: Path, plan: Plan) -> set[str]:
    """Ids of the plan's runs that have their row."""
    return {row["id"] for row in table.read(out / plan.table)} & {run.id for run in plan.runs}


def recorded(out: Path, plan: Plan) -> dict[str, int]:
    """The same with the releases of training that each row was made after."""
    return {row["id"]: row["releases"] for row in table.read(out / plan.table)}


def claim(out: Path, plan: Plan) -> None:
    """Results of two plans never meet in one folder. A plan may grow: what is finished stays, and the new runs are added."""
    path = out / STUDY
    if path.exists():
        known = read_plan(path)
        now = json.loads(json.dumps(defaults_of(known)))  # as the runs that are there would be made today
        check_same(read_defaults(out), now, "out", str(out), "are")
        if known.digest == plan.digest:
            return
        if not plan.extends(known):
            fix = "Give another folder, or remove this one; a plan may gain runs, and nothing else may change"
            raise bad("out", str(out), plan.unlike(known), fix)
    if not path.exists() or (out / DEFAULTS).exists():
        text = json.dumps(defaults_of(plan), indent=1, sort_keys=True)
        replace(out / DEFAULTS, f"{text}\n".encode())  # before the plan, without which they belong to none
    plan.write(path)


def group(plan: Plan, out: Path, size: int, only: str = "") -> list[tuple[Path, list[PlannedRun]]]:
    """Stacks to run: those under way as they were begun, then what is left, in stacks of equal batch size,
    the largest first, which take the fewest steps."""
    done = finished(out, plan)
    known = {run.id: run for run in plan.runs}
    waiting = {i: run for i, run in known.items() if i not in done}
    stacks: list[tuple[Path, list[PlannedRun]]] = []
    for folder, ids in under_way(plan, out):
        # Whatever is asked for now, and even if others of its runs came in from elsewhere: their charges are one.
        stacks.append((folder, [known[i] for i in ids]))
        waiting = {i: run for i, run in waiting.items() if i not in ids}
    by_batch: dict[int, list[PlannedRun]] = {}
    for run in (run for run in waiting.values() if only in run.id):
        by_batch.setdefault(run.batch_size, []).append(run)
    taken = {int(folder.name) for folder, _ in stacks}
    for batch_size in sorted(by_batch, reverse=True):
        runs = by_batch[batch_size]
        for start in range(0, len(runs), size):
            number = next(n for n in range(len(plan.runs) + len(taken) + 1) if n not in taken)
            taken.add(number)
            stacks.append((out / "stacks" / f"{number:04}", runs[start : start + size]))
    return stacks


def under_way(plan: Plan, out: Path) -> list[tuple[Path, list[str]]]:
    """Stacks of which a run has no row yet, and the ids of all their runs. Where all have theirs it was killed before it was
    cleared up, which is done now."""
    done, found = finished(out, plan), []
    for folder, ids in stacks_of(out):
        if all(i in done for i in ids):
            retire(folder, out)
        else:
            found.append((folder, ids))
    return found


def stacks_of(out: Path) -> list[tuple[Path, list[str]]]:
    """The folders of stacks, and the ids of their runs: none where it was not opened yet."""
    folders = sorted((out / "stacks").iterdir()) if (out / "stacks").exists() else ()
    return [(f, json.loads((f / RUNS).read_text()) if (f / RUNS).exists() else []) for f in folders]


def retire(folder: Path, out: Path) -> None:
    """A stack is finished: its ledger, which says what its ε came from, is kept; the rest goes."""
    if (folder / LEDGER).exists():
        # Named by its content: an id is what a file says of itself, and may be a path or another ledger's.
        kept = out / LEDGERS / hashlib.sha256((folder / LEDGER).read_bytes()).hexdigest()[:16]
        kept.mkdir(parents=True, exist_ok=True)
        if not read(folder / LEDGER).names and (folder / RUNS).exists():  # from before ledgers named their runs
            shutil.copy(folder / RUNS, kept / RUNS)
        os.replace(folder / LEDGER, kept / LEDGER)
    shutil.rmtree(folder)


def run_names(ledger: Path, record: Record) -> list[str]:
    """The ids of a ledger's runs, in its order.

    A ledger of version 1 has none. Then each of its runs is known by σ and C, which the ids beside it say, and never by its
    place: a stack sorts its runs.
    """
    if record.names:
        return list(record.names)
    if record.runs == 1:
        return [record.id]
    try:
        ids = json.loads(ledger.with_name(RUNS).read_text("utf-8"))
        said = [(_SAID.search(i), i) for i in ids]
        kinds = [
            tuple(f"{terms[key]:g}" for key in ("noise_multiplier", "max_grad_norm")) for terms in record.rows[0][0]
        ]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, IndexError):
        said, kinds = [], []
    left = {kind: [i for found, i in said if found and found.groups() == kind] for kind in kinds}
    if not kinds or any(len(left[kind]) != kinds.count(kind) for kind in left) or _mixed(record, kinds):
        return [f"run {i}" for i in range(record.runs)]
    return [left[kind].pop(0) for kind in kinds]


def _mixed(record: Record, kinds: list[tuple[str, ...]]) -> bool:
    """Whether two runs of one kind have different terms, so that it matters which is which."""
    first = {kind: kinds.index(kind) for kind in kinds}
    return any(terms[i] != terms[first[kind]] for terms, _ in record.rows for i, kind in enumerate(kinds))


def open_stack(folder: Path, runs: Sequence[PlannedRun]) -> None:
    """The stack is under way from here on, and its runs stay together."""
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / RUNS, json.dumps([run.id for run in runs]).encode())


def record(out: Path, plan: Plan, results: Results) -> None:
    """Add finished runs to the tables. Done twice it is done once: no run stands twice. What its row said it cost, perhaps on
    another machine, is never taken back."""
    for run, content in results.posteriors.items():
        target = out / "posteriors" / f"{run}.safetensors"
        target.parent.mkdir(exist_ok=True)
        replace(target, content)
    table.add(out / DIAGNOSTICS, results.diagnostics, table.DIAGNOSTIC_COLUMNS)
    before = {row["id"]: row for row in table.read(out / plan.table)}
    rows = [row | table.larger(before[row["id"]], row) if row["id"] in before else row for row in results.rows]
    table.add(out / plan.table, rows)


# ---- what each stack is doing


NOTE = "now.json"


class Note:
    """Kept in the stack's folder, and written no more often than people look."""

    def __init__(self, folder: Path) -> None:
        self.path, self._last = folder / NOTE, float("-inf")

    def write(self, words: str) -> None:
        if time.monotonic() - self._last >= 2.0:
            self._last = time.monotonic()
            with contextlib.suppress(StorageError):  # no study ends for want of a note
                replace(self.path, json.dumps({"words": words, "time": time.time()}).encode())


def noted(folder: Path) -> str:
    """The last note with its age; nothing where there is none that can be read."""
    try:
        found = json.loads((folder / NOTE).read_text())
        return f"{max(0, round(time.time() - found['time']))} s ago: {found['words']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def status_lines(out: Path) -> list[str]:
    """In words, one line per method and one line per stack under way."""
    if not (out / STUDY).exists():
        raise bad("out", str(out), "holds no study", "Give the folder that `dpivon study run` wrote")
    plan = read_plan(out / STUDY)
    done = finished(out, plan)
    planned = Counter(run.method for run in plan.runs)
    ready = Counter(run.method for run in plan.runs if run.id in done)
    lines = [f"{plan.name}: {sum(ready.values())} of {len(plan.runs)} runs finished"]
    lines += [f"  {method}: {ready[method]} of {n}" for method, n in planned.items()]
    for folder, runs in stacks_of(out):
        if not runs:
            continue
        charged = read(folder / LEDGER).releases if (folder / LEDGER).exists() else 0
        rows = sum(run in done for run in runs)
        words = f"stack {folder.name}, {len(runs)} runs, {charged} releases charged to each"
        words += f", {rows} have their rows" if rows else ""
        now = noted(folder)
        lines.append(f"  under way: {words}" + (f"; {now}" if now else ""))
    return lines


# ---- defaults


DEFAULTS = "defaults.json"
_FIX = "Go on with the version that it was begun with, or name the option in the study and give another folder"

Defaults = dict[str, dict[str, Any]]


def defaults_of(plan: Plan) -> Defaults:
    """By method, every option that one of its runs leaves out."""
    found: Defaults = {}
    for run in plan.runs:
        method = METHODS[run.method]
        values = {**method.defaults, "trace": method.trace, "averages": method.averages}
        found.setdefault(run.method, {}).update({k: v for k, v in values.items() if k not in run.options})
    return found


def read_defaults(out: Path) -> Defaults:
    """Of results that are older than this file nothing is known."""
    path = out / DEFAULTS
    if not path.exists():
        return {}
    try:
        found: Defaults = json.loads(path.read_text(encoding="utf-8"))
        return {str(method): dict(options) for method, options in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        problem = f"is not a table of options by method ({type(error).__name__})"
        raise bad("out", str(path), problem, "Restore it, or give another folder") from None


def check_same(then: Defaults, now: Defaults, argument: str, folder: str, words: str) -> None:
    """Refuse to add to results runs that are made another way."""
    for method in then.keys() & now.keys():
        for option in sorted(then[method].keys() & now[method].keys()):
            was, is_now = then[method][option], now[method][option]
            if was != is_now:
                problem = (
                    f"holds results of {method} with {option} = {was!r} where a study says nothing; others {words} made "
                    f"with {is_now!r}"
                )
                raise bad(argument, folder, problem, _FIX)


def merge(out: Path, others: Sequence[Path]) -> dict[Path, int]:
    """Add to ``out`` the runs that it lacks; how many came from each folder.

    A run that two machines finished keeps the row it has: both are the same run, and ε is the larger of the two, for
    what was charged on either machine. Every ledger comes along, first of all: a row whose ε nothing vouches for would be worse
    than a ledger without its rows.

    The other folders may be a stranger's: a link in one is an error, and so is a cell that a spreadsheet would execute.
    """
    for folder in others:  # all before any: a wrong folder changes nothing
        _check_files(folder)
        if not (folder / STUDY).exists():
            raise bad("others", str(folder), "holds no study", "Give folders that `dpivon study run` wrote")
        first = out if (out / STUDY).exists() else others[0]
        here, there = (read_plan(at / STUDY) for at in (first, folder))
        if here.digest != there.digest:
            raise bad("others", str(folder), f"{here.unlike(there)} than {first}", "Merge runs of one plan")
        check_same(read_defaults(folder), read_defaults(first), "others", str(folder), f"in {first} are")
        _check_cells(folder)
    out.mkdir(parents=True, exist_ok=True)
    added = {}
    for folder in others:
        if not (out / STUDY).exists():
            if (folder / DEFAULTS).exists():
                shutil.copy(folder / DEFAULTS, out / DEFAULTS)
            shutil.copy(folder / STUDY, out / STUDY)
        for ledger in sorted((folder / LEDGERS).glob("[!.]*/")):
            _copy_whole(ledger, out / LEDGERS)
        plan = read_plan(out / STUDY)
        mine = {row["id"]: row for row in table.read(out / plan.table)}
        theirs = table.read(folder / plan.table)
        new = {row["id"] for row in theirs} - mine.keys()
        both = [mine[r["id"]] | table.larger(mine[r["id"]], r) for r in theirs if r["id"] in mine]
        dearer = [row for row in both if row != mine[row["id"]]]
        if points := [d for d in table.read(folder / DIAGNOSTICS) if d["id"] in new]:
            table.add(out / DIAGNOSTICS, points, table.DIAGNOSTIC_COLUMNS)
        table.add(out / plan.table, [*(r for r in theirs if r["id"] in new), *dearer])
        added[folder] = len(new)
    return added


def _check_files(folder: Path) -> None:
    """Whatever is read or copied below is a file in the folder itself: a link could name any file of whoever merges."""
    names = (STUDY, DEFAULTS, "runs.csv", "tuning.csv", DIAGNOSTICS, LEDGERS)
    for path in [*(folder / name for name in names), *(folder / LEDGERS).glob("*"), *(folder / LEDGERS).glob("*/*")]:
        if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
            fix = "Replace it by the file itself, or remove it"
            raise bad("others", str(path), "is a link or not a plain file", fix)


def _check_cells(folder: Path) -> None:
    for name in (read_plan(folder / STUDY).table, DIAGNOSTICS):
        for row in table.read(folder / name):
            for column, value in row.items():
                if isinstance(value, str) and is_formula(value):
                    raise bad(column, value, f"is a formula, not a result (in {folder / name})", "Remove the row")


def _copy_whole(source: Path, folder: Path) -> None:
    """Copy a ledger's folder, unless it is there. A stack whose folder was copied went on under one id on two machines, and
    what either charged is to be seen: then the second gets a number."""
    for number in itertools.count(1):
        to = folder / (source.name if number == 1 else f"{source.name}-{number}")
        if not to.exists():
            break
        if _ledger(to) == _ledger(source):
            return
    part = to.with_name(f".{to.name}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name in (LEDGER, RUNS):  # and nothing else that lies there
        if (source / name).exists():
            shutil.copy(source / name, part / name, follow_symlinks=False)
    part.rename(to)


def _ledger(folder: Path) -> bytes:
    path = folder / LEDGER
    return path.read_bytes() if path.exists() else b""
