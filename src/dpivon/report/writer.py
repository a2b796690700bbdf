"""From a folder to its report."""

from __future__ import annotations

import importlib
import shlex
from dataclasses import dataclass
from pathlib import Path

from dpivon.durable.files import replace
from dpivon.errors import bad
from dpivon.report.page import GENERATOR, Content, page

REPORT, FORMATS = "report.html", ("png", "pdf")
#: Kinds of folders: the file that tells one, and the module whose ``content(folder, again)`` says what its report holds.
KINDS = {"summary.json": "dpivon.report.run", "runs.csv": "dpivon.study.results.html_report"}


@dataclass(frozen=True)
class Built:
    """What was written, and what could not be: section by section, why."""

    report: Path
    kind: str
    sections: tuple[str, ...]
    left_out: dict[str, str]
    figures: tuple[Path, ...] = ()


def build(folder: Path, out: Path | None = None, figures: Path | None = None) -> Path:
    """Write the report of a ``dpivon train`` run or of a study, and return where.

    ``out`` is the HTML file, by default ``report.html`` in the folder; ``figures`` a folder for each figure as PNG and PDF.
    """
    return write(folder, out, figures).report


def write(folder: Path, out: Path | None = None, figures: Path | None = None) -> Built:
    """As :func:`dpivon.report.build`, with the list of what is in the report and what is not."""
    folder = Path(folder)
    target = folder / REPORT if out is None else Path(out)
    _check_out(target)
    if figures is not None and Path(figures).exists() and not Path(figures).is_dir():
        raise bad("figures", str(figures), "is a file", "Name a folder")
    again = ["dpivon", "report", str(folder)]
    again += ["--out", str(target)] if target != folder / REPORT else []
    again += ["--figures", str(figures)] if figures is not None else []
    content = _content(folder, shlex.join(again))
    text = page(content, shlex.join(again))
    drawn = content.figures(Path(figures), FORMATS) if figures is not None else []
    target.parent.mkdir(parents=True, exist_ok=True)
    replace(target, text.encode())
    missing = {s.title: s.left_out for s in content.sections if s.left_out}
    there = tuple(s.title for s in content.sections if not s.left_out)
    return Built(target, content.kind, there, missing, tuple(drawn))


def _content(folder: Path, again: str) -> Content:
    for file, module in KINDS.items():
        if (folder / file).is_file():
            found: Content = importlib.import_module(module).content(folder, again)
            return found
    problem = "holds neither summary.json nor runs.csv" if folder.is_dir() else "is no folder"
    fix = "Give the folder of a finished `dpivon train` or of a `dpivon study run`"
    raise bad("folder", str(folder), problem, fix)


def _check_out(target: Path) -> None:
    """Only a new file, or an earlier report: a slip of the pen must not cost a ledger."""
    if target.is_dir():
        raise bad("out", str(target), "is a folder", "Name a file, such as report.html")
    if target.exists():
        with target.open("rb") as file:
            if f'content="{GENERATOR}"'.encode() not in file.read(4096):
                problem = "exists and is no report of ours, so it is left alone"
                raise bad("out", str(target), problem, "Name another file")
