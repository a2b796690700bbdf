"""Which code made a row: the commit, a digest of the code that makes numbers, and whether rows may be compared."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from dpivon.errors import bad
from dpivon.study.results.table import Row

COMMIT = "DPIVON_COMMIT"  # names the commit where the code was copied without its history
UNKNOWN = "unknown"
_PACKAGE = Path(__file__).parents[2]
#: What a number depends on. Commands, pages and reports are not among it.
_NUMBERS = ("data", "methods", "models", "optim", "privacy", "stacked", "study/run", "variational")
_FILES = ("dropout.py", "metrics.py", "posterior.py", "predict.py", "recipe.py", "release.py", "temperature.py")


@cache
def code() -> str:
    """A digest of every source file that a number depends on; equal where those files are, in whatever commit."""
    found = [p for folder in _NUMBERS for p in (_PACKAGE / folder).rglob("*.py")] + [_PACKAGE / name for name in _FILES]
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@cache
def commit() -> str:
    """The commit of this checkout, with '+changes' where its source files differ from it; 'unknown' outside a checkout."""
    found = _git("rev-parse", "--short=10", "HEAD") if _git("ls-files", "_version.py") else ""
    if not found:
        return os.environ.get(COMMIT) or UNKNOWN
    return f"{found}+changes" if _git("status", "--porcelain", "--", ".") else found


def check_code(rows: Sequence[Row], *, mixed: bool = False) -> str:
    """What a page says of the code of its rows.

    Raises:
        ArgumentError: Rows of different code stand together, and ``mixed`` does not allow it.
    """
    counts = Counter(row.get("code") or row.get("commit") or UNKNOWN for row in rows)
    names = {row.get("code") or row.get("commit") or UNKNOWN: row.get("commit") or UNKNOWN for row in rows}
    listed = ", ".join(f"{names[key]} ({n})" for key, n in sorted(counts.items(), key=lambda item: -item[1]))
    if len(counts) == 1:
        return f"Commit {next(iter(names.values()))}."
    if not mixed:
        fix = "Run them again with one version, or give --mixed-code to compare them all the same, which the page will say"
        raise bad("rows", listed, "were made by different code", fix)
    return f"**Rows of different code are compared here**, by commit (runs): {listed}."


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=_PACKAGE, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
