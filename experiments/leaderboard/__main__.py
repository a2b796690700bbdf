"""Small networks at ε = 3 and 7.5: rebuild every page and figure from its tables.

python -m experiments.leaderboard
"""

from __future__ import annotations

from pathlib import Path

from dpivon.terminal import say
from experiments.commands import command_line, study_folders
from experiments.paper.report import write_pages
from experiments.strong_privacy.compare.command import compare

COMMAND = "python -m experiments.leaderboard"
RESULTS = Path(__file__).parent / "results"
app = command_line(__doc__)


@app.callback()
def rebuild() -> None:
    """Rebuild every page and figure of the experiment."""
    written = [path for folder in study_folders(Path(__file__).parent) for path in write_pages(folder, command=COMMAND)]
    for path in [*written, *compare([RESULTS / "leaderboard"], RESULTS / "comparison", command=COMMAND)]:
        say(path)


if __name__ == "__main__":
    app()
