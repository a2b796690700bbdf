"""A study's folder as the report sees it: its table, its diagnostics and its plan. Seeds and run names stay there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpivon.study.plan import Plan, read_plan
from dpivon.study.report import load
from dpivon.study.table import Row

RUNS, DIAGNOSTICS, PLAN = "runs.csv", "diagnostics.csv", "study.json"
READ = (RUNS, DIAGNOSTICS, PLAN)


@dataclass(frozen=True, eq=False)
class StudyFolder:
    folder: Path
    rows: list[Row]
    diagnostics: list[Row]
    plan: Plan | None


def read(folder: Path) -> StudyFolder:
    rows, diagnostics = load(folder)
    return StudyFolder(folder, rows, diagnostics, read_plan(folder / PLAN) if (folder / PLAN).exists() else None)
