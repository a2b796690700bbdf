"""Finished runs of one plan from several machines, in one folder."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path

from dpivon.csv_cells import is_formula
from dpivon.errors import bad
from dpivon.privacy.accounting.recorded import LEDGER, STUDY
from dpivon.study.plan.plan import read_plan
from dpivon.study.results import table
from dpivon.study.results.folder import DEFAULTS, LEDGERS, RUNS, check_same, read_defaults

#: Tables of several rows a run.
BESIDE = {"diagnostics.csv": table.DIAGNOSTIC_COLUMNS, "robustness.csv": table.ROBUSTNESS_COLUMNS}


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
        for name, columns in BESIDE.items():
            points = [d for d in table.read(folder / name) if d["id"] in new]
            if points:
                table.add(out / name, points, columns)
        table.add(out / plan.table, [*(r for r in theirs if r["id"] in new), *dearer])
        added[folder] = len(new)
    return added


def _check_files(folder: Path) -> None:
    """Whatever is read or copied below is a file in the folder itself: a link could name any file of whoever merges."""
    names = (STUDY, DEFAULTS, "runs.csv", "tuning.csv", *BESIDE, LEDGERS)
    for path in [*(folder / name for name in names), *(folder / LEDGERS).glob("*"), *(folder / LEDGERS).glob("*/*")]:
        if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
            fix = "Replace it by the file itself, or remove it"
            raise bad("others", str(path), "is a link or not a plain file", fix)


def _check_cells(folder: Path) -> None:
    for name in (read_plan(folder / STUDY).table, *BESIDE):
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
