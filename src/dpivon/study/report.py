"""Everything that follows from the tables: PLD's ε, a summary by cell, the figures, the claims."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpivon.errors import bad
from dpivon.privacy.accounting import epsilon
from dpivon.study import table
from dpivon.study.ablations import ablations_page, draw_ablations, is_ablation
from dpivon.study.beyond import BEYOND
from dpivon.study.beyond_figures import draw_beyond
from dpivon.study.beyond_page import beyond_page
from dpivon.study.cells import Cells
from dpivon.study.check import check_page
from dpivon.study.claims_page import claims_page
from dpivon.study.figures import draw_figures, save
from dpivon.study.hooks import HOOKS
from dpivon.study.plan import Plan, read_plan
from dpivon.study.table import SCORES, Row
from dpivon.study.tuning import candidates, epsilon_with_tuning, history


def load(out: Path) -> tuple[list[Row], list[Row]]:
    """(runs, diagnostics) of a results folder."""
    rows = table.read(out / "runs.csv")
    if not rows:
        raise bad("out", str(out), "holds no runs.csv with a finished run", "Give what `dpivon study run` wrote")
    return rows, table.read(out / "diagnostics.csv")


def figures_of(out: Path, rows: Sequence[Row], diagnostics: Sequence[Row]) -> list[Path]:
    """The figures of a grid: the paper's, or those of what was looked at beyond it."""
    if beyond := table.read(out / BEYOND):
        return draw_beyond(rows, beyond, out / "figures")
    return draw_figures(rows, diagnostics, out / "figures")


def fill_pld(out: Path, rows: list[Row]) -> None:
    """ε by privacy loss distributions, where the table lacks it: the GPU machine need not have dp-accounting."""
    known: dict[tuple[float, float, int, float], float] = {}
    for row in rows:
        if row["epsilon_pld"] is None:
            key = (*history(row)[0], row["delta"])
            if key not in known:
                known[key] = epsilon(history(row), row["delta"], "pld")
            row["epsilon_pld"] = known[key]
    if known:
        table.write(out / "runs.csv", rows)


def write_report(out: Path, tuning: Path | None = None, check: Path | None = None) -> list[Path]:
    """Rebuild all that follows from the tables.

    A grid gives figures, ``summary.csv``, ``claims.md`` and, with tuning, ``tuning.md``; a study of variants gives
    ``summary.csv``, ``ablations.md`` and its figure, since its cells hold several kinds of run; one that also ran in the
    ordinary loop gives ``summary.csv`` and ``check.md``, and one that looked beyond the test set its own figures and
    ``beyond.md``: the paper's claims are about another grid.

    ``tuning`` and ``check`` are the folders of the study that chose the rates and of the one that ran in the ordinary loop;
    without them, OUT-tuning and OUT-check beside OUT, if they are there.
    """
    rows, diagnostics = load(out)
    fill_pld(out, rows)
    tuned = _beside(out, tuning, "tuning", "tuning.csv")
    plan = read_plan(out / "study.json") if (out / "study.json").exists() else None
    title = plan.name if plan else out.name
    summary = out / "summary.csv"
    _summary(rows, tuned, summary)
    if is_ablation(rows):
        rows = _in_order(rows, plan)
        page = out / "ablations.md"
        page.write_text(ablations_page(rows, title=title, plan=plan), encoding="utf-8")
        return [*save(draw_ablations(rows), out / "figures" / "ablations"), summary, page]
    if hooks := table.read(out / HOOKS):
        page = out / "check.md"
        page.write_text(check_page(rows, hooks), encoding="utf-8")
        return [summary, page]
    beyond = table.read(out / BEYOND)
    figures = figures_of(out, rows, diagnostics)
    if beyond:
        page = out / "beyond.md"
        text = beyond_page(rows, beyond, title=title, plan=plan, figures=figures)
    else:
        page = out / "claims.md"
        timed = _beside(out, check, "check", HOOKS)
        text = claims_page(rows, diagnostics, title=title, plan=plan, figures=figures, timed=timed)
    page.write_text(text, encoding="utf-8")
    written = [*figures, summary, page]
    if tuned:
        page = out / "tuning.md"
        page.write_text(_tuning_page(rows, tuned), encoding="utf-8")
        written.append(page)
    return written


def _beside(out: Path, given: Path | None, kind: str, name: str) -> list[Row]:
    """A table of the study that goes with OUT: of the folder that was given, of OUT itself, or of its neighbour."""
    if given is not None:
        rows = table.read(given / name)
        if not rows:
            raise bad(kind, str(given), f"holds no {name}", f"Give the folder of the {kind} study, or leave it out")
        return rows
    return table.read(out / name) or table.read(out.resolve().with_name(f"{out.resolve().name}-{kind}") / name)


def _in_order(rows: list[Row], plan: Plan | None) -> list[Row]:
    """As the plan has them, not as they were finished: what it names first is what the others are held against, unless the
    paper's plain method is there."""
    place = {run.id: i for i, run in enumerate(plan.runs)} if plan else {}
    return sorted(rows, key=lambda row: place.get(row["id"], len(place)))


def _summary(rows: Sequence[Row], tuned: Sequence[Row], path: Path) -> None:
    """A row a cell: settings, ε three ways, and mean and standard deviation of every score."""
    measures = (*SCORES, *(f"mc_{s}" for s in SCORES), "projected_share", "h_median", "std_median")
    columns = ["method", "options", "batch_size", "noise_multiplier", "max_grad_norm", "lr", "seeds"]
    columns += ["epsilon", "epsilon_pld", "epsilon_with_tuning", "delta"]
    columns += [f"{m}{end}" for m in measures for end in ("", "_std")]
    out = []
    kinds = sorted({(row["method"], row["options"], row["lr"]) for row in rows})
    for method, options, lr in kinds:
        mine = [r for r in rows if (r["method"], r["options"], r["lr"]) == (method, options, lr)]
        cells = Cells(mine)
        for key in cells.keys:
            members = [
                r for r in mine if (r["method"], r["batch_size"], r["noise_multiplier"], r["max_grad_norm"]) == key
            ]
            worst = max(members, key=lambda r: r["epsilon"])  # one ε a cell: the largest of its runs
            row: Row = {k: worst[k] for k in ("epsilon", "epsilon_pld", "delta", "lr", "options")}
            row |= dict(zip(("method", "batch_size", "noise_multiplier", "max_grad_norm"), key, strict=True))
            row |= {"seeds": len(members), "epsilon_with_tuning": epsilon_with_tuning(worst, tuned) if tuned else None}
            for m in measures:
                if (found := cells.get(*key, m)) is not None:
                    row |= {m: found.mean, f"{m}_std": found.std}
            out.append(row)
    table.write(path, out, tuple(columns))


def _tuning_page(rows: Sequence[Row], tuned: Sequence[Row]) -> str:
    used: dict[str, set[float]] = {}
    for row in rows:
        used.setdefault(row["method"], set()).add(row["lr"])
    lines = [
        "# Learning rates",
        "",
        "Mean validation accuracy and NLL over the tuning grid; the test set was not read.",
        "",
    ]
    lines += ["| method | rate | accuracy | NLL | |", "|---|---|---|---|---|"]
    for method, found in candidates(tuned).items():
        for i, c in enumerate(found):
            mine = used.get(method, set())
            words = ["chosen"] if i == 0 and len(mine) < 2 else []  # not where every cell has its own
            words += ["used in the grid" if len(mine) < 2 else "used in a part of the grid"] if c.lr in mine else []
            lines.append(f"| {method} | {c.lr:g} | {c.accuracy:.4f} | {c.nll:.4f} | {', '.join(words)} |")
    sigmas = sorted({row["noise_multiplier"] for row in tuned})
    lines += ["", "The best rate at each σ alone:", "", "| method | " + " | ".join(f"σ = {s:g}" for s in sigmas) + " |"]
    lines.append("|---" * (len(sigmas) + 1) + "|")
    for method in candidates(tuned):
        best = [
            candidates([r for r in tuned if r["method"] == method and r["noise_multiplier"] == s])[method][0].lr
            for s in sigmas
        ]
        lines.append(f"| {method} | " + " | ".join(f"{lr:g}" for lr in best) + " |")
    lines += [
        "",
        "ε in the tables and figures excludes tuning. `epsilon_with_tuning` in summary.csv composes a run with the "
        "training of every candidate of its method; the held-out pictures that chose among them are taken to be public.",
    ]
    return "\n".join(lines) + "\n"
