"""Robustness: corrupted images, out-of-distribution images and selective prediction.

python -m experiments.robustness                                  # rebuild everything in results/
python -m experiments.robustness report study-output/NAME         # the same pages for a study of yours
"""

from __future__ import annotations

from pathlib import Path

import typer

from dpivon.terminal import say
from experiments.commands import Out, Tuning, command_line, study_folders
from experiments.robustness.report import write_pages

app = command_line(__doc__)


@app.callback()
def rebuild(context: typer.Context) -> None:
    """Rebuild every page and figure of the experiment."""
    if context.invoked_subcommand is None:
        for folder in study_folders(Path(__file__).parent):
            for path in write_pages(folder):
                say(path)


@app.command()
def report(out: Out, tuning: Tuning = None) -> None:
    """Rebuild the pages of one folder."""
    for path in write_pages(out, tuning=tuning):
        say(path)


if __name__ == "__main__":
    app()
