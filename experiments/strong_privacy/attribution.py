"""The recipe in the paper's setting, beside the paper's methods with averaged iterates, a temperature and a rate per σ.

    python -m experiments.strong_privacy    # writes results/attribution/attribution.md with every other page

The bar is in studies/attribution.yaml. The recipe's runs are those of strong-grid, the paper's own those of the paper's grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from textwrap import wrap

from dpivon.study.results import table
from dpivon.study.results.summary import IVON
from dpivon.study.results.table import CELL, Row, check_code, title_of
from experiments.strong_privacy.compare.statistics import Interval, interval

RECIPE, BASELINES = "dp-steady", ("dp-sgd", "dp-adam")
Cells = dict[tuple[float, ...], dict[str, list[Row]]]


def cells(rows: Sequence[Row]) -> Cells:
    """Rows by cell (b, σ, C) and method, in order of their seeds."""
    found: Cells = {}
    for row in sorted(rows, key=lambda r: (*(r[k] for k in CELL), r["seed"])):
        found.setdefault(tuple(row[k] for k in CELL), {}).setdefault(row["method"], []).append(row)
    return found


def less(ours: Sequence[Sequence[Row]], theirs: Sequence[Sequence[Row]], column: str, factor: float = 1.0) -> Interval:
    """Differences by seed, averaged over cells first, of the seeds that all of them have."""
    seeds = set.intersection(*({r["seed"] for r in rows} for rows in (*ours, *theirs)))
    by_seed = []
    for seed in sorted(seeds):
        one, other = ([next(r[column] for r in rows if r["seed"] == seed) for rows in part] for part in (ours, theirs))
        by_seed.append(factor * (fmean(one) - fmean(other)))
    return interval(by_seed)


def better(cell: dict[str, list[Row]], column: str) -> list[Row]:
    """The rows of the baseline that is better on the test set: accurate, or of lower loss."""
    sign = -1.0 if column.endswith("accuracy") else 1.0
    there = [cell[m] for m in BASELINES if m in cell]
    return min(there, key=lambda rows: sign * fmean(r[column] for r in rows))


def rates(rows: Sequence[Row], tuning: Sequence[Row]) -> list[str]:
    """Sentences on choices at the edge of their candidates."""
    edges = []
    for row in (r for r in rows if r["seed"] == rows[0]["seed"]):
        tried = sorted({r["lr"] for r in tuning if all(r[k] == row[k] for k in ("method", *CELL))})
        if len(tried) > 1 and row["lr"] in (tried[0], tried[-1]):
            edges.append(f"{title_of(row['method'])} at σ = {row['noise_multiplier']:g}")
    chosen = f"Chosen rates at an edge of their candidates, beyond which a better one may lie: {', '.join(edges)}."
    return [chosen if edges else "No chosen rate lies at an edge of its candidates."]


def page(rows: Sequence[Row], recipe: Sequence[Row], paper: Sequence[Row], tuning: Sequence[Row]) -> str:
    """attribution.md."""
    ours, new, old = cells(recipe), cells(rows), cells(paper)
    places = [place for place in new if place in ours and any(m in new[place] for m in BASELINES)]
    body = []
    for place in places:
        head = f"b = {place[0]:g}, σ = {place[1]:g}, C = {place[2]:g} (ε = {ours[place][RECIPE][0]['epsilon']:.2g})"
        entries = [(title_of(RECIPE), ours[place][RECIPE])]
        for method in (*BASELINES, IVON):
            entries += [(f"{title_of(method)}, averaged, tempered, tuned", new[place].get(method, []))]
            entries += [(f"{title_of(method)} as in the paper's grid", old.get(place, {}).get(method, []))]
        for name, found in entries:
            if found:
                scores = [f"{fmean(r['accuracy'] for r in found):.3f}"]
                for k in ("tempered_nll", "tempered_ece"):
                    values = [r[k] for r in found if r[k] is not None]
                    scores.append(f"{fmean(values):.3f}" if values else "")
                rate = ", ".join(f"{r:g}" for r in sorted({r["lr"] for r in found}))
                body.append(f"| {head} | {name} | {rate} | {len(found)} | {' | '.join(scores)} |")
    lines = ["# Where the recipe's points in the paper's setting come from", ""]
    if places:
        lines += [*wrap(_verdict(places, ours, new, old), 100), ""]
    words = (
        "The recipe has averaged iterates, a private temperature and a step that knows the number of steps. Here the "
        "paper's methods have averaged iterates of the same window, the same temperature and a rate per σ, chosen at the full "
        f"length on 5,000 held-out training images. {' '.join(rates(rows, tuning))} Accuracy is that of the mean. Intervals "
        "are Student's over seeds, cells averaged within a seed; the recipe's noise is not shared with the others'. "
        + check_code([*rows, *recipe, *paper], mixed=True)
    )
    lines += [*wrap(words, 100), "", "| cell | method | rate | seeds | accuracy | NLL, tempered | ECE, tempered |"]
    return "\n".join([*lines, "|---|---|---|---|---|---|---|", *body]) + "\n"


def _verdict(places: Sequence[tuple[float, ...]], ours: Cells, new: Cells, old: Cells) -> str:
    recipe = [ours[p][RECIPE] for p in places]
    points = less(recipe, [better(new[p], "accuracy") for p in places], "accuracy", 100.0)
    loss = less(recipe, [better(new[p], "tempered_nll") for p in places], "tempered_nll")
    where = f"over {len(places)} cell{'s' if len(places) > 1 else ''} of the paper's grid"
    own = "its points are its own" if points.low > 0 else "its points are not shown to be its own"
    text = (
        f"**Against the better of DP-SGD and DP-Adam on the test set, each averaged and tuned, the recipe is "
        f"{points.mean:+.2f} points [{points.low:.2f}, {points.high:.2f}] {where}, its tempered NLL {loss.mean:+.3f} "
        f"[{loss.low:.3f}, {loss.high:.3f}]: by the bar that was fixed before, {own}.**"
    )
    if all(any(m in old.get(p, {}) for m in BASELINES) for p in places):
        before = less(recipe, [better(old[p], "accuracy") for p in places], "accuracy", 100.0)
        span = f"{before.mean:+.2f} [{before.low:.2f}, {before.high:.2f}]"
        text += f" Against the paper's grid, without either, it was {span} in these cells."
    if all(IVON in new[p] for p in places):
        ivon = less(recipe, [new[p][IVON] for p in places], "accuracy", 100.0)
        text += f" Against DP-IVON-Gradsq it is {ivon.mean:+.2f} [{ivon.low:.2f}, {ivon.high:.2f}]."
    return text.replace(" -", " −").replace("[-", "[−")


def tables(results: Path, paper: Path | None = None) -> tuple[list[Row], list[Row], list[Row]]:
    """Rows of the study, and those of the recipe and of the paper's grid in its cells."""
    rows = table.read(results / "attribution" / "runs.csv")
    places = cells(rows)
    recipe = table.read(results / "strong-grid" / "runs.csv")
    theirs = table.read(paper / "paper" / "runs.csv") if paper else []
    one, other = ([r for r in some if tuple(r[k] for k in CELL) in places] for some in (recipe, theirs))
    return rows, one, other


def points(results: Path) -> Interval:
    """The recipe less the better baseline on the test set."""
    rows, recipe, _ = tables(results)
    new, ours = cells(rows), cells(recipe)
    return less([ours[p][RECIPE] for p in new], [better(new[p], "accuracy") for p in new], "accuracy", 100.0)


def report(results: Path, paper: Path) -> list[Path]:
    """Write the page from the tables, where they are."""
    folder = results / "attribution"
    if not (folder / "runs.csv").is_file():
        return []
    rows, recipe, theirs = tables(results, paper)
    target = folder / "attribution.md"
    text = page(rows, recipe, theirs, table.read(results / "attribution-tuning" / "tuning.csv"))
    target.write_text(text, encoding="utf-8")
    return [target]
