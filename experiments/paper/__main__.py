"""The paper's experiment: its pages and figures from its tables, and its methods in the ordinary loop.

python -m experiments.paper                              # rebuild everything in results/
python -m experiments.paper report study-output/quick    # the same pages for a study of yours
python -m experiments.paper hooks experiments/paper/studies/paper-check.yaml --out OUT --data DATA
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpivon.terminal import say
from experiments.commands import Data, Out, Tuning, command_line, study_folders
from experiments.paper.hooks import HOOKS, run_hooks
from experiments.paper.report import write_pages

COMMAND = "python -m experiments.paper"
app = command_line(__doc__)


@app.callback()
def rebuild(context: typer.Context) -> None:
    """Rebuild every page and figure of the experiment."""
    if context.invoked_subcommand is None:
        for folder in study_folders(Path(__file__).parent):
            for path in write_pages(folder, command=COMMAND):
                say(path)


@app.command()
def report(
    out: Out,
    tuning: Tuning = None,
    check: Annotated[Path | None, typer.Option(help="Results that `hooks` has timed; by default OUT-check.")] = None,
) -> None:
    """Rebuild the pages of one folder."""
    for path in write_pages(out, tuning=tuning, check=check, command=COMMAND):
        say(path)


@app.command()
def hooks(
    study: Annotated[Path, typer.Argument(help="A study (.yaml) or a plan (.json) of few runs.")],
    out: Annotated[Path, typer.Option(help="Folder of results, where the stacked runs of the same plan are.")],
    data: Data = Path("data"),
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default what there is.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Begin no run after so long.")] = None,
) -> None:
    """Run a plan one by one in the ordinary loop, to hold the stacks to it."""
    from dpivon.study.plan import config
    from dpivon.study.plan.plan import read_plan
    from dpivon.study.run.settings import Settings

    plan = read_plan(study) if study.suffix == ".json" else config.resolve(study)
    outcome = run_hooks(plan, out, Settings(data, device, minutes=minutes))
    for line in outcome.lines(out / HOOKS):
        say(line)
    raise typer.Exit(outcome.exit_code)


if __name__ == "__main__":
    app()
