"""Strong privacy: the recipe against tuned baselines, every bar with a verdict.

python -m experiments.strong_privacy                                       # rebuild everything in results/
python -m experiments.strong_privacy report OUT                            # `dpivon report`, with its own estimators
python -m experiments.strong_privacy compare OUT --tuning OUT-tuning --to FOLDER    # hold any method against others
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpivon.report.writer import report
from dpivon.study.commands import study
from dpivon.terminal import say
from experiments.commands import ROOT, command_line, study_folders
from experiments.paper.report import write_pages
from experiments.strong_privacy.compare.command import compare as judged

COMMAND = "python -m experiments.strong_privacy"
RESULTS, PAPER = Path(__file__).parent / "results", ROOT / "experiments" / "paper" / "results"
COMPARED = (
    RESULTS / "strong-epsilon",
    RESULTS / "strong-paper",
    RESULTS / "strong-grid",
    PAPER / "paper",
    RESULTS / "strong-fashion",
)
TUNED = (
    RESULTS / "strong-epsilon-tuning",
    RESULTS / "strong-paper-tuning",
    PAPER / "paper-tuning",
    RESULTS / "strong-fashion-tuning",
)
app = command_line(__doc__)
app.command()(report)
app.add_typer(study, name="study", help="`dpivon study`, with the estimators of this experiment registered.")


@app.callback()
def rebuild(context: typer.Context) -> None:
    """Rebuild every page and figure of the experiment."""
    if context.invoked_subcommand is None:
        from experiments.strong_privacy import attribution, choosing, few_steps, recipe_page, simulation, spread

        written = [
            path for folder in study_folders(Path(__file__).parent) for path in write_pages(folder, command=COMMAND)
        ]
        written += attribution.report(RESULTS, PAPER)
        written += judged(COMPARED, RESULTS / "comparison", tunings=TUNED, command=COMMAND, mixed_code=True)
        for part in (recipe_page.report, few_steps.report, simulation.report, spread.report, choosing.report):
            written += part(RESULTS)
        for path in written:
            say(path)


@app.command()
def compare(
    outs: Annotated[list[Path], typer.Argument(help="Folders of results, one or several.")],
    to: Annotated[Path, typer.Option(help="Folder for the page, its tables and figures.")],
    tuning: Annotated[list[Path] | None, typer.Option(help="Results of a tuning study; may be repeated.")] = None,
    ours: Annotated[str, typer.Option(help="The method that is judged.")] = "dp-steady",
    baseline: Annotated[
        list[str] | None, typer.Option(help="What it is held against.", show_default="dp-sgd, dp-adam")
    ] = None,
    mixed_code: Annotated[bool, typer.Option("--mixed-code", help="Compare rows of different code too.")] = False,
) -> None:
    """Hold one method against others, in pairs: rates and the best baseline by validation data, every bar with a verdict."""
    baselines = baseline or ("dp-sgd", "dp-adam")
    for path in judged(outs, to, tunings=tuning or [], ours=ours, baselines=baselines, mixed_code=mixed_code):
        say(path)


if __name__ == "__main__":
    app()
