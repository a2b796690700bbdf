"""comparison.md: the verdicts first, then what they were made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from dpivon.study.results.table import Value, check_code
from experiments.strong_privacy.compare import bars as rules
from experiments.strong_privacy.compare.cell import Cell, Contender
from experiments.strong_privacy.compare.field import MEAN, RAW, TEMPERED, Field
from experiments.strong_privacy.compare.pooled import areas, curves
from experiments.strong_privacy.compare.remarks import remarks
from experiments.strong_privacy.compare.rollup import rollup
from experiments.strong_privacy.compare.scopes import Scope
from experiments.strong_privacy.compare.statistics import holm, interval, p_value
from experiments.strong_privacy.compare.verdict import NOT_MEASURED, Bar, between

_PAIRS = (
    "**Pairs.** Repetition i of one method is held against repetition i of the other. Runs of a repetition begin at the same "
    "weights in studies of one seed and network; these owe nothing to the data. Noise and batches are each run's own: with "
    "shared noise whoever sees two runs could subtract it, and the budgets stated would be wrong. So pairing removes what "
    "the first weights do, and the rest of the spread stays in the intervals. They leave out the sampling of the test set "
    "and the noise of tuning."
)
_SCORES = (
    "**Scores.** *Raw* is how a method predicts: by the average over draws where it has a posterior, by its point otherwise; "
    "*mean* is at the posterior's mean. *Tempered* is raw after a temperature chosen privately on the training data, and "
    "its ε is that of training and temperature together. All methods of a cell have the same model, data, σ, C, b and number "
    "of steps, hence the same ε, by RDP; it excludes tuning."
)


def comparison_page(
    field: Field, where: Sequence[Scope], judged: dict[Contender, list[Bar]], figures: Sequence[Path], command: str
) -> str:
    """``judged`` are the bars for each contender of ours, in the same order."""
    baselines = " and ".join(Contender(m).title for m in field.baselines)
    lines = [f"# {Contender(field.ours).title} against {baselines}", "", f"    {command}", ""]
    lines += [_made(field), "", "## The bars in short", "", *_short(field, judged), ""]
    lines += ["## Read this first", "", _PAIRS, "", _SCORES, "", *(f"- {r}" for r in remarks(field, where)), ""]
    lines += ["## The bars, part by part", "", _definition(), *_bars(field, judged)]
    for figure in figures:
        lines += ["", f"![{figure.stem}](figures/{figure.name})"]
    for scope in (s for s in where if s.cells):
        lines += [
            "",
            f"## {scope.heading}",
            "",
            *_differences(field, scope),
            *_areas(field, scope),
        ]
        for cell in scope.cells:
            lines += ["", *_cell(field, cell)]
    return "\n".join(lines) + "\n"


def _definition() -> str:
    return " ".join((rules.__doc__ or "").split("\n\n", 1)[1].split())


def _made(field: Field) -> str:
    rows = field.rows
    hardware = " and ".join(sorted({f"{row['hardware']}, torch {row['torch']}" for row in rows}))
    folders = ", ".join(f"`{out.name}`" for out in field.outs)
    return f"{len(rows)} runs of {folders} on {hardware}; every run by its numbers in their `study.json`. " + (
        check_code(rows, mixed=True)
    )


def _short(field: Field, judged: dict[Contender, list[Bar]]) -> list[str]:
    """One line per bar, one column per contender of ours."""
    found = [rollup(bars) for bars in judged.values()]
    lines = ["| bar | where | " + _roles(field, judged) + " |", "|---" * (2 + len(judged)) + "|"]
    for parts in zip(*found, strict=True):
        name, where, _ = parts[0]
        lines.append(f"| {name} | {where} | " + " | ".join(f"**{verdict}**" for *_, verdict in parts) + " |")
    return lines


def _bars(field: Field, judged: dict[Contender, list[Bar]]) -> list[str]:
    """One table per scope, every part of its bars with the numbers."""
    lines: list[str] = []
    for scope in dict.fromkeys(bar.scope for bars in judged.values() for bar in bars):
        found = [[bar for bar in bars if bar.scope == scope] for bars in judged.values()]
        lines += ["", f"### {scope[0].upper()}{scope[1:]}", ""]
        if all(bar.verdict == NOT_MEASURED and not bar.numbers for bars in found for bar in bars):
            parts = ", ".join(dict.fromkeys(bar.number for bar in found[0]))
            lines.append(f"**Not measured**: {parts}. These folders hold nothing that could tell.")
            continue
        lines += ["| | bar | " + _roles(field, judged) + " |", "|---" * (2 + len(judged)) + "|"]
        for each in zip(*found, strict=True):
            cells = [f"**{b.verdict}**{f': {b.numbers}' if b.numbers else ''}" for b in each]
            lines.append(f"| {each[0].number} | {each[0].text} | " + " | ".join(cells) + " |")
    return lines


def _roles(field: Field, contenders: Iterable[Contender]) -> str:
    """Column heads."""
    words = []
    for c in contenders:
        validated = any(e.candidates for found in field.entries.values() if (e := found.get(c)) is not None)
        tuned = "at the rate that validation data chose" if validated else "at the rate that was run"
        words.append("as shipped, at its default rate" if c.default else tuned)
    return " | ".join(words)


def _differences(field: Field, scope: Scope) -> list[str]:
    """Ours less every baseline, cell by cell."""
    out: list[str] = []
    for ours in (c for c in field.contenders if c.method == field.ours and not c.variant):
        for kind, measure, factor, digits, title in (
            (RAW, "accuracy", 100.0, 2, "accuracy, in points"),
            (TEMPERED, "nll", 1.0, 4, "NLL after the temperature"),
            (RAW, "nll", 1.0, 4, "NLL, raw"),
        ):
            lines = _against_each(field, scope, ours, (kind, measure), factor, digits)
            if lines:
                head = [f"less {Contender(m).title}" for m in field.baselines]
                out += [
                    f"**{ours.title}: {title}.** In bold the best baseline; p is about it, by Holm over these cells.",
                    "",
                ]
                out += ["| | " + " | ".join([*head, "best by", "p"]) + " |", "|---" * (len(head) + 3) + "|", *lines, ""]
    return out


def _against_each(
    field: Field, scope: Scope, ours: Contender, score: tuple[str, str], factor: float, digits: int
) -> list[str]:
    """One line per cell; none where nothing can be compared."""
    found: list[tuple[Cell, dict[str, str], str, float]] = []
    for cell in scope.cells:
        entry, best = field.entries[cell].get(ours), field.best(cell, score[1])
        if entry is None or best is None:
            continue
        words, p = {}, math.nan
        for rival in field.rivals(cell):
            each = field.differences(entry, rival, *score)
            if each is None:
                continue
            i = interval([factor * d for d in each.values()])
            words[rival.contender.method] = f"{i.mean:+.{digits}f} {between(i, digits, '+')}"
            if rival is best[0]:
                words[rival.contender.method] = f"**{i.mean:+.{digits}f}** {between(i, digits, '+')}"
                p = p_value(list(each.values()))
        if not math.isnan(p):
            found.append((cell, words, best[1], p))
    lines = []
    for (cell, words, by, _), p in zip(found, holm([p for *_, p in found]), strict=True):
        shown = [words.get(m, NOT_MEASURED) for m in field.baselines]
        lines.append(f"| {cell.label}, ε = {field.epsilon(cell):.3g} | " + " | ".join([*shown, by, f"{p:.2g}"]) + " |")
    return lines


def _areas(field: Field, scope: Scope) -> list[str]:
    found = curves(scope.cells)
    if not found:
        return []
    shown = [c for c in field.contenders if any(c in field.entries[cell] for cell in scope.cells)]
    lines = [
        "**Area under raw accuracy over log ε** (a mean accuracy, in per cent; in brackets its 95 % interval).",
        "",
    ]
    lines += ["| | " + " | ".join(c.title for c in shown) + " |", "|---" * (len(shown) + 1) + "|"]
    for setting, cells in found.items():
        words = []
        for c in shown:
            each = areas(field, cells, c)
            i = None if each is None else interval([100 * x for x in each.values()])
            words.append("" if i is None else f"{i.mean:.2f} {between(i, 2)}")
        lines.append(f"| {setting.label} | " + " | ".join(words) + " |")
    return [*lines, ""]


def _cell(field: Field, cell: Cell) -> list[str]:
    total = field.total(cell)
    spent = f"ε = {field.epsilon(cell):.4g}" + (f", with the temperature {total:.4g}" if total is not None else "")
    lines = [f"### {cell.label}: {spent}", ""]
    columns = [
        ("accuracy", RAW, "accuracy"), ("accuracy, mean", MEAN, "accuracy"),
        ("NLL, mean", MEAN, "nll"), ("NLL, raw", RAW, "nll"), ("NLL, tempered", TEMPERED, "nll"),
        ("ECE, mean", MEAN, "ece"), ("ECE, raw", RAW, "ece"), ("ECE, tempered", TEMPERED, "ece"),
    ]  # fmt: skip
    head = ["rate", "chosen", "runs", "validation accuracy", *(title for title, _, _ in columns)]
    lines += ["| | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for contender in field.contenders:
        entry = field.entries[cell].get(contender)
        if entry is None:
            continue
        values = [field.summary(entry, kind, measure) for _, kind, measure in columns]
        seen = f"{entry.validation.accuracy:.3f}" if entry.validation else ""
        runs = f"{len(entry.rows)} of {len(entry.planned)}" if entry.missing else f"{len(entry.rows)}"
        start = [contender.title, f"{entry.lr:g}", entry.chosen, runs, seen]
        lines.append("| " + " | ".join([*start, *(_number(v) for v in values)]) + " |")
    return lines


def _number(v: Value | None) -> str:
    if v is None:
        return ""
    return f"{v.mean:.4f} ± {v.std:.4f}" if v.n > 1 else f"{v.mean:.4f}"
