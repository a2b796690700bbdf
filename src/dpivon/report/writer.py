"""From a folder to its report: :func:`build`, and the command ``dpivon report``."""

from __future__ import annotations

import importlib
import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from dpivon.durable.files import replace
from dpivon.errors import bad
from dpivon.report.figures import draw
from dpivon.report.page import GENERATOR, Content, page
from dpivon.terminal import say

REPORT, FORMATS = "report.html", ("png", "pdf")
#: Kinds of folders: the file that tells one, and the module whose ``content(folder, again)`` says what its report holds.
KINDS = {"summary.json": "dpivon.report.run", "runs.csv": "dpivon.study.results.summary"}


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
    drawn = [] if figures is None else draw(content.charts, content.confusion, Path(figures), FORMATS)
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
    problem = "holds neither summary.json nor runs.csv" if folder.is_dir() else "is not a folder"
    fix = "Give the folder of a finished `dpivon train` or of a `dpivon study run`"
    raise bad("folder", str(folder), problem, fix)


def _check_out(target: Path) -> None:
    """Only a new file, or an earlier report: a slip of the pen must not cost a ledger."""
    if target.is_dir():
        raise bad("out", str(target), "is a folder", "Name a file, such as report.html")
    if target.exists():
        with target.open("rb") as file:
            if f'content="{GENERATOR}"'.encode() not in file.read(4096):
                problem = "exists and is not a report of dpivon, so it is left alone"
                raise bad("out", str(target), problem, "Name another file")


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a `dpivon train` run or of a study.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file; by default report.html in the folder.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Also a folder for every figure as PNG and PDF.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written, and what was left out, as JSON.")
    ] = False,
) -> None:
    """Write one HTML file about a run or a study: what it reveals about a person, and what it can do.

    It works offline, and holds no training example and no seed. Results on test and held-out data are in it; they are not
    private.

    Example: dpivon report study-output/quick --out quick.html
    """
    built = write(folder, out, figures)
    if as_json:
        say(json.dumps(asdict(built), default=str))
        return
    for path in (built.report, *built.figures):
        say(path)
    for title, why in built.left_out.items():
        say(f"left out: {title}: {why}")
