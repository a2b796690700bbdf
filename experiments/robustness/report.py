"""beyond.md and its figures, from the tables of a folder of results."""

from __future__ import annotations

from pathlib import Path

from dpivon.errors import bad
from dpivon.study.results import table
from dpivon.study.results.summary import read_tables, write_summary, write_tuning
from dpivon.study.run.robustness import BEYOND
from experiments.robustness.figures import draw_beyond
from experiments.robustness.page import beyond_page


def write_pages(out: Path, *, tuning: Path | None = None) -> list[Path]:
    """Rebuild figures, ``summary.csv``, ``beyond.md`` and, with tuning, ``tuning.md``; what was written."""
    beyond = table.read(out / BEYOND)
    if not beyond:
        raise bad("out", str(out), f"holds no {BEYOND}", "Give the results of a study with `evaluate:`")
    tables = read_tables(out, tuning)
    figures = draw_beyond(tables.rows, beyond, out / "figures")
    page = out / "beyond.md"
    title = tables.plan.name if tables.plan else out.name
    page.write_text(beyond_page(tables.rows, beyond, title=title, plan=tables.plan, figures=figures), encoding="utf-8")
    return [*figures, write_summary(out, tables), page, *write_tuning(out, tables)]
