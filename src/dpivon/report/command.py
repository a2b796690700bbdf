"""``dpivon report``: what people type."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dpivon.terminal import say


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
    from dpivon.report.writer import write

    built = write(folder, out, figures)
    if as_json:
        say(json.dumps(asdict(built), default=str))
        return
    say(built.report)
    for path in built.figures:
        say(path)
    for title, why in built.left_out.items():
        say(f"left out: {title}: {why}")
