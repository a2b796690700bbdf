"""claims.md: the verdicts with their numbers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from opacus.accountants import RDPAccountant

from dpivon.study.plan.plan import Plan
from dpivon.study.results.table import Cells, Row
from experiments.paper import claims
from experiments.paper.claims import UNTESTED, Claim, Claims, regime
from experiments.paper.provenance import provenance


def claims_page(
    rows: Sequence[Row],
    diagnostics: Sequence[Row],
    *,
    title: str,
    plan: Plan | None,
    figures: Sequence[Path] = (),
    timed: Sequence[Row] = (),
    command: str,
) -> str:
    """A table of verdicts, then every claim with its numbers."""
    averaged = {c.number: c for c in Claims(rows, diagnostics, averaged=True, timed=timed).all()}
    plain = {c.number: c for c in Claims(rows, diagnostics, averaged=False, timed=timed).all()}
    cells = Cells(rows)
    lines = [f"# {title}: the paper's claims against the table", ""]
    if plan and plan.dataset != "cifar10":
        lines += [
            f"**This is {plan.dataset}, not the paper's experiment: the verdicts show the machinery, not the paper.**",
            "",
        ]
    lines += [f"Written by `{command}` from `runs.csv` and `diagnostics.csv`. " + provenance(rows, plan), ""]
    lines += [_definition(), ""]
    lines += [*_regimes(cells), "", *_axes(cells), ""]
    lines += ["| | the paper says | posterior mean | Monte-Carlo average |", "|---|---|---|---|"]
    for number, claim in plain.items():
        lines.append(f"| {number} | {claim.sentence} | {verdict(claim)} | {verdict(averaged[number])} |")
    for figure in figures:
        lines += ["", f"![{figure.stem}](figures/{figure.name})"]
    for number, claim in plain.items():
        lines += [
            "",
            f"## {number}: {verdict(claim)}",
            "",
            f"> {claim.sentence}",
            "",
            f"Taken to say: {claim.statement}.",
        ]
        lines += ["", *numbers_table(claim)]
        if numbers_table(averaged[number]) != numbers_table(claim):
            lines += [
                "",
                f"With Monte-Carlo averages: **{verdict(averaged[number])}**.",
                "",
                *numbers_table(averaged[number]),
            ]
    if plan and plan.assumptions:
        lines += ["", "## Assumptions", "", *(f"- {note}" for note in plan.assumptions)]
    return "\n".join(lines) + "\n"


def _definition() -> str:
    return " ".join((claims.__doc__ or "").split("\n\n", 1)[1].split())


def _regimes(cells: Cells) -> list[str]:
    out = []
    for name in ("weak", "medium", "strong"):
        found = [
            v.mean for key in cells.keys if regime(key[2]) == name and (v := cells.get(*key, "epsilon")) is not None
        ]
        if found:
            out.append(f"- {name} privacy: ε from {min(found):.3g} to {max(found):.3g}")
    return out


def _axes(cells: Cells) -> list[str]:
    """ε of every b and σ by our RDP, by PLD, and by RDP at the orders of Opacus, which the paper's axis has."""
    lines = ["ε of a cell by our RDP, by PLD, and by RDP at Opacus's orders, as the paper computes it:", ""]
    lines += ["| b | σ | ε (RDP) | ε (PLD) | ε (Opacus's orders) |", "|---|---|---|---|---|"]
    for b, sigma in sorted({(key[1], key[2]) for key in cells.keys}):
        row = next(row for key in cells.keys if key[1:3] == (b, sigma) for row in cells.members[key])
        theirs = opacus_epsilon(sigma, b / row["train_size"], row["releases"], row["delta"])
        ours = [f"{row[name]:.3g}" if row[name] is not None else "" for name in ("epsilon", "epsilon_pld")]
        lines.append(f"| {b} | {sigma:g} | {' | '.join(ours)} | {theirs:.3g} |")
    return lines


def opacus_epsilon(sigma: float, rate: float, steps: int, delta: float) -> float:
    """By Opacus's own accountant at its default orders."""
    accountant = RDPAccountant()
    accountant.history = [(sigma, rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the best order may be the largest or smallest of its list
        return float(accountant.get_epsilon(delta))


def verdict(claim: Claim) -> str:
    """In words, with how many of its comparisons hold."""
    if not claim.comparisons:
        return UNTESTED
    held = sum(c.holds for c in claim.comparisons)
    return f"{claim.verdict} ({held} of {len(claim.comparisons)})"


def numbers_table(claim: Claim) -> list[str]:
    """One line per comparison."""
    if not claim.comparisons:
        return ["The table has no cells that could tell."]
    return ["| where | | numbers |", "|---|---|---|"] + [
        f"| {c.where} | {'holds' if c.holds else 'fails'} | {c.numbers} |" for c in claim.comparisons
    ]
