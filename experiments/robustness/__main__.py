"""Robustness: corrupted images, out-of-distribution images and selective prediction.

python -m experiments.robustness                                  # rebuild everything in results/
python -m experiments.robustness report study-output/NAME         # the same pages for a study of yours
python -m experiments.robustness evaluate OUT EVALUATION --data DATA   # OUT/robustness.csv, after `study run --keep`
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpivon.terminal import say
from experiments.commands import Data, Out, Tuning, command_line, study_folders
from experiments.robustness.evaluate import evaluate as evaluated
from experiments.robustness.evaluate import read_evaluation
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
def evaluate(
    out: Out,
    evaluation: Annotated[Path, typer.Argument(help="What to look at (.yaml), such as studies/beyond-evaluate.yaml.")],
    data: Data = Path("data"),
) -> None:
    """Score the kept posteriors of a study on corrupted and OOD images."""
    say(evaluated(out, read_evaluation(evaluation), data, say))


@app.command()
def report(out: Out, tuning: Tuning = None) -> None:
    """Rebuild the pages of one folder."""
    for path in write_pages(out, tuning=tuning):
        say(path)


if __name__ == "__main__":
    app()
