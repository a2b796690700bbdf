"""Write the result tables into README.md, between its markers.

python -m experiments.leaderboard.wide.report            # writes the page
python -m experiments.leaderboard.wide.report --check    # fails if the page is not what the tables give
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev

from experiments.leaderboard.priors import tables
from experiments.leaderboard.priors.arms import number, table, wrapped

HERE = Path(__file__).parent
Row = dict[str, str]
#: A row's own columns of scores: title, column, factor, digits.
SCORES = (
    ("accuracy, %", "accuracy", 100.0, 2),
    ("ten views, %", "tta_accuracy", 100.0, 2),
    ("NLL", "tempered_nll", 1.0, 3),
    ("ECE", "tempered_ece", 1.0, 3),
)


def _of(rows: Sequence[Row], split: str) -> list[Row]:
    return [row for row in rows if row["split"] == split]


def _score(rows: Sequence[Row], column: str, factor: float, digits: int) -> str:
    values = [factor * float(row[column]) for row in rows if row.get(column)]
    if not values:
        return ""
    return number(mean(values), digits) + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def _grouped(rows: Sequence[Row], names: Sequence[str]) -> dict[tuple[str, ...], list[Row]]:
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def heads(heads_: Sequence[Row], runs: Sequence[Row]) -> str:
    """The best arm of every method on validation images, and the chosen ones on the test set."""
    lines = []
    for split in ("validation", "test"):
        names = "prior", "places", "epsilon", "method"
        for (prior, places, e, method), rows in _grouped(_of(heads_, split), names).items():
            best = max(rows, key=lambda r: float(r["accuracy"]))
            shown = [best] if split == "validation" else rows
            own = [_score(shown, c, f, d) for _, c, f, d in SCORES if c != "tta_accuracy"]
            lines.append([split, prior, places, f"{float(e):g}", method, best["lr"], best["steps"], *own])
    lines.sort(key=lambda line: (*line[:3], float(line[3]), line[4]))
    return table(
        ["split", "prior", "places", "ε", "method", "rate", "T", *(t for t, c, *_ in SCORES if c != "tta_accuracy")],
        lines,
    )


def runs(heads_: Sequence[Row], runs_: Sequence[Row]) -> str:
    """All weights: every setting, on validation images and on the test set."""
    names = ("split", "prior", "epsilon", "method", "lr", "batch", "steps", "views", "places")
    names += ("share", "head_method", "head_lr")
    lines = []
    for key, rows in _grouped(runs_, names).items():
        split, prior, e, *rest, share, method, lr = key
        own = [_score(rows, c, f, d) for _, c, f, d in SCORES]
        first = _score(rows, "head_accuracy", 100.0, 2) if int(rows[0]["head_steps"]) else ""
        phase = f"{method} {float(lr):g} at {float(share):g} ε" if float(share) else "none"
        lines.append([split, prior, f"{float(e):g}", *rest, phase, str(len(rows)), first, *own])
    lines.sort(key=lambda line: (line[0], line[1], float(line[2]), line[3], float(line[4])))
    titles = [
        "split",
        "prior",
        "ε",
        "method",
        "rate",
        "b",
        "T",
        "views",
        "places",
        "head",
        "runs",
        "head, %",
        *(t for t, *_ in SCORES),
    ]
    return table(titles, lines)


def provenance(heads_: Sequence[Row], runs_: Sequence[Row]) -> str:
    both = [*heads_, *runs_]
    kinds = {name: sorted({row[name] for row in both if row.get(name)}) for name in ("device", "torch", "commit")}
    said = ", ".join(f"{name} {', '.join(each)}" for name, each in kinds.items())
    minutes = sum(float(row["seconds"]) for row in runs_) / 60
    spent = max((float(r["epsilon_spent"]) / float(r["epsilon"]) for r in both), default=0.0)
    return wrapped(
        f"{len(runs_)} runs of all weights, {minutes:.0f} minutes of training, and {len(heads_)} of the head: {said}. "
        f"δ = 1e-5, C = 1; no run spends more than {spent:.4f} of its ε, both phases and a reserve for calibration included."
    )


BLOCKS: dict[str, Callable[[Sequence[Row], Sequence[Row]], str]] = {f.__name__: f for f in (heads, runs, provenance)}


def filled(text: str, heads_: Sequence[Row], runs_: Sequence[Row]) -> str:
    for name, make in BLOCKS.items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise SystemExit(
                f"README.md: needs '<!-- begin {name} -->' and '<!-- end {name} -->' once. Add the markers."
            )
        made = make(heads_, runs_)
        text = pattern.sub(lambda m, made=made: f"{m[1]}{made}\n{m[2]}", text)  # type: ignore[misc]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, default=HERE / "README.md")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page would change")
    a = parser.parse_args()
    text = a.page.read_text()
    made = filled(text, *(tables.read(a.results / f"wide-{name}.csv") for name in ("heads", "runs")))
    if a.check and made != text:
        raise SystemExit(f"{a.page}: is not what {a.results} gives. Run this command without --check.")
    if not a.check:
        a.page.write_text(made)


if __name__ == "__main__":
    main()
