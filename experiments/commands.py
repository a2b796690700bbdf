"""What the command lines of the experiments share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dpivon.errors import DpivonError
from dpivon.terminal import say

ROOT = Path(__file__).parents[1]

Data = Annotated[Path, typer.Option("--data", envvar="DPIVON_DATA", help="Folder that holds the data set.")]
Out = Annotated[Path, typer.Argument(help="Folder of results.")]
Tuning = Annotated[Path | None, typer.Option(help="Results of the tuning study; by default OUT-tuning.")]


class _Commands(TyperGroup):
    """Commands whose deliberate errors are one line, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DpivonError as error:
            say(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None


def command_line(help: str | None) -> typer.Typer:
    """An experiment's command line; its callback rebuilds everything."""
    return typer.Typer(cls=_Commands, help=help, invoke_without_command=True, pretty_exceptions_enable=False)


def study_folders(experiment: Path) -> list[Path]:
    """The folders of an experiment's results that hold a final study."""
    return sorted(path.parent for path in experiment.glob("results/*/runs.csv"))
