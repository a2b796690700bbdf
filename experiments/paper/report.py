"""The pages of a folder of results: the paper's claims, variants side by side, or stacks against the ordinary loop."""

from __future__ import annotations

from pathlib import Path

from dpivon.report.figures import save
from dpivon.study.plan.plan import Plan
from dpivon.study.results import table
from dpivon.study.results.summary import IVON, beside, read_tables, write_summary, write_tuning
from dpivon.study.results.table import Row, is_ablation
from experiments.paper.ablations import ablations_page, draw_ablations
from experiments.paper.check import check_page
from experiments.paper.claims_page import claims_page
from experiments.paper.figures import draw_figures
from experiments.paper.hooks import HOOKS

STATED = "-stated"


def write_pages(out: Path, *, tuning: Path | None = None, check: Path | None = None, command: str) -> list[Path]:
    """Rebuild all that follows from the tables of ``out``; ``command`` is what the pages say they were written by.

    A grid gives figures, ``summary.csv``, ``claims.md`` and, with tuning, ``tuning.md``. A study of variants gives
    ``summary.csv``, ``ablations.md`` and its figure. One that also ran in the ordinary loop gives ``summary.csv`` and
    ``check.md``. Without ``tuning`` and ``check`` the folders OUT-tuning and OUT-check are taken, where they exist. NAME-stated
    is judged with DP-IVON-Gradsq's runs of NAME, whose rate is the stated one.
    """
    tables = read_tables(out, tuning)
    rows, plan = tables.rows, tables.plan
    diagnostics = tables.diagnostics
    if out.name.endswith(STATED):
        other = read_tables(out.with_name(out.name.removesuffix(STATED)), None)
        rows = [*rows, *(row for row in other.rows if row["method"] == IVON)]
        diagnostics = [*diagnostics, *other.diagnostics]
    title = plan.name if plan else out.name
    summary = write_summary(out, tables)
    if is_ablation(rows):
        rows = _in_order(rows, plan)
        page = out / "ablations.md"
        page.write_text(ablations_page(rows, title=title, plan=plan, command=command), encoding="utf-8")
        return [*save(draw_ablations(rows), out / "figures" / "ablations"), summary, page]
    if hooks := table.read(out / HOOKS):
        page = out / "check.md"
        page.write_text(check_page(rows, hooks), encoding="utf-8")
        return [summary, page]
    figures = draw_figures(rows, diagnostics, out / "figures")
    page = out / "claims.md"
    timed = beside(out, check, "check", HOOKS)
    text = claims_page(rows, diagnostics, title=title, plan=plan, figures=figures, timed=timed, command=command)
    page.write_text(text, encoding="utf-8")
    return [*figures, summary, page, *write_tuning(out, tables)]


def _in_order(rows: list[Row], plan: Plan | None) -> list[Row]:
    """As the plan has them, not as they were finished: what it names first is what the others are held against, unless the
    paper's plain method is there."""
    place = {run.id: i for i, run in enumerate(plan.runs)} if plan else {}
    return sorted(rows, key=lambda row: place.get(row["id"], len(place)))
