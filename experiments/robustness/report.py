"""robustness.md and its figures, from the tables of a folder of results."""

from __future__ import annotations

from pathlib import Path

from dpivon.errors import bad
from dpivon.study.results import table
from dpivon.study.results.summary import read_tables, write_summary, write_tuning
from experiments.robustness.evaluate import ROBUSTNESS
from experiments.robustness.figures import draw_robustness
from experiments.robustness.page import robustness_page


def write_pages(out: Path, *, tuning: Path | None = None) -> list[Path]:
    """Rebuild figures, ``summary.csv``, ``robustness.md`` and, with tuning, ``tuning.md``; what was written."""
    beyond = table.read(out / ROBUSTNESS)
    if not beyond:
        raise bad("out", str(out), f"holds no {ROBUSTNESS}", "Run `python -m experiments.robustness evaluate` first")
    tables = read_tables(out, tuning)
    figures = draw_robustness(tables.rows, beyond, out / "figures")
    page = out / "robustness.md"
    title = tables.plan.name if tables.plan else out.name
    page.write_text(
        robustness_page(tables.rows, beyond, title=title, plan=tables.plan, figures=figures), encoding="utf-8"
    )
    return [*figures, write_summary(out, tables), page, *write_tuning(out, tables)]
