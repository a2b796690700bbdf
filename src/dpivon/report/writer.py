"""From a folder to its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpivon.durable.files import replace
from dpivon.errors import bad
from dpivon.metrics import accuracy, ece
from dpivon.report import examples, privacy, provenance, study_sections, testset, training, width
from dpivon.report import run_folder as run_files
from dpivon.report import study_folder as study_files
from dpivon.report.figures import draw
from dpivon.report.page import GENERATOR, Section, page
from dpivon.report.statement import Reading
from dpivon.study.figures import draw_figures, title_of
from dpivon.study.variants import is_ablation

REPORT, FORMATS = "report.html", ("png", "pdf")


@dataclass(frozen=True)
class Built:
    """What was written, and what could not be: section by section, why."""

    report: Path
    kind: str
    sections: tuple[str, ...]
    left_out: dict[str, str]
    figures: tuple[Path, ...] = ()


def build(folder: Path, out: Path | None = None, figures: Path | None = None) -> Path:
    """Write the report of a ``dpivon train`` run or of a study, and return where.

    ``out`` is the HTML file, by default ``report.html`` in the folder; ``figures`` a folder for each figure as PNG and PDF.
    """
    return write(folder, out, figures).report


def write(folder: Path, out: Path | None = None, figures: Path | None = None) -> Built:
    """As :func:`dpivon.report.build`, with the list of what is in the report and what is not."""
    folder = Path(folder)
    target = folder / REPORT if out is None else Path(out)
    _check_out(target)
    if figures is not None and Path(figures).exists() and not Path(figures).is_dir():
        raise bad("figures", str(figures), "is a file", "Name a folder")
    again = provenance.command(folder, target, figures)
    if (folder / run_files.SUMMARY).is_file():
        kind, sections, text, drawn = _of_run(folder, again, figures)
    elif (folder / study_files.RUNS).is_file():
        kind, sections, text, drawn = _of_study(folder, again, figures)
    else:
        found = "holds neither summary.json nor runs.csv" if folder.is_dir() else "is no folder"
        fix = "Give the folder of a finished `dpivon train` or of a `dpivon study run`"
        raise bad("folder", str(folder), found, fix)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace(target, text.encode())
    missing = {s.title: s.left_out for s in sections if s.left_out}
    return Built(target, kind, tuple(s.title for s in sections if not s.left_out), missing, tuple(drawn))


_Parts = tuple[str, Sequence[Section], str, list[Path]]


def _of_run(folder: Path, again: str, figures: Path | None) -> _Parts:
    run = run_files.read(folder)
    checked = privacy.check(run)
    sections = [
        privacy.section(run, checked),
        training.section(run),
        testset.section(run),
        examples.section(run),
        width.section(run),
        provenance.configuration(run),
        provenance.choices(run),
        provenance.ledger(run, checked),
        provenance.machine(provenance.run_facts(run), again),
    ]
    summary = run.summary
    reading = Reading(checked.epsilon, summary.delta)
    facts = [("ε", reading.shown), ("δ", f"{summary.delta:g}"), ("an attacker guesses right at most", reading.guess)]
    if run.test is not None:
        t = run.test
        facts += [("test accuracy", f"{accuracy(t.averaged, t.labels):.1%}".replace("%", " %"))]
        facts += [("test ECE", f"{ece(t.averaged, t.labels):.3f}")]
    method = title_of(summary.method)
    size = "" if summary.dataset_size is None else f" on {summary.dataset_size:,} examples"
    words = [part for part in (summary.task.inputs, summary.task.network) if part]
    intro = f"One private training{size}{': ' + '; '.join(words) if words else ''}."
    text = page(f"{method}: privacy and predictions", intro, facts, sections, again)
    charts = [chart for section in sections for chart in section.charts]
    drawn = draw(charts, testset.confusion_of(run), figures, FORMATS) if figures is not None else []
    return "run", sections, text, drawn


def _of_study(folder: Path, again: str, figures: Path | None) -> _Parts:
    study = study_files.read(folder)
    sections = [
        study_sections.privacy(study),
        study_sections.curves(study),
        study_sections.widths(study),
        study_sections.cells(study),
        study_sections.predictions(),
        study_sections.configuration(study),
        provenance.machine(study_sections.machine_facts(study), again),
    ]
    name = study.plan.name if study.plan is not None else folder.resolve().name
    intro = f"{len(study.rows)} private trainings on {study.rows[0]['dataset'] or 'one data set'}, compared."
    text = page(f"Study {name}", intro, study_sections.headline(study), sections, again)
    if figures is None:
        return "study", sections, text, []
    if is_ablation(study.rows):  # the study's own figures would average its variants
        charts = [chart for section in sections for chart in section.charts]
        return "study", sections, text, draw(charts, None, figures, FORMATS)
    return "study", sections, text, draw_figures(study.rows, study.diagnostics, figures, FORMATS)


def _check_out(target: Path) -> None:
    """Only a new file, or an earlier report: a slip of the pen must not cost a ledger."""
    if target.is_dir():
        raise bad("out", str(target), "is a folder", "Name a file, such as report.html")
    if target.exists():
        with target.open("rb") as file:
            if f'content="{GENERATOR}"'.encode() not in file.read(4096):
                raise bad(
                    "out", str(target), "exists and is no report of ours, so it is left alone", "Name another file"
                )
