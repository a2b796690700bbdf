"""Write the result tables into the README, between its markers.

    python -m experiments.leaderboard.priors.report            # writes README.md
    python -m experiments.leaderboard.priors.report --check    # fails if README.md is not what the tables give

A block lies between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; :data:`BLOCKS` has the names.
"""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from experiments.leaderboard.priors import tables
from experiments.leaderboard.priors.plans import EPSILONS, SCRATCH, SETTING, Row, best_rate, validated
from experiments.strong_privacy.compare.statistics import Interval, interval

HERE = Path(__file__).parent
BASELINES = {"dp-sgd": "DP-SGD", "dp-adam": "DP-Adam"}
#: Validation images.
SCORED = 5000
ARMS = {
    "scratch": "recipe from scratch",
    "prior": "recipe from the prior",
    "head first": "recipe from the prior, head first",
    **{method: f"{title} from the prior" for method, title in BASELINES.items()},
}


@dataclass(frozen=True)
class Results:
    """Rows of all tables."""

    runs: list[Row]
    probe: list[Row]
    learning: list[Row]
    bars: list[Row]

    @classmethod
    def read(cls, folder: Path) -> Results:
        return cls(*(tables.read(folder / f"{name}.csv") for name in ("runs", "probe", "learning", "bars")))

    @property
    def prior(self) -> str:
        """The prior that the test rows start from."""
        (name,) = {row["start"] for row in self.runs if row["split"] == "test"} - {SCRATCH}
        return name

    def arm(self, name: str, epsilon: float) -> list[Row]:
        """Test rows of one arm of the comparison, ordered by seed."""
        found = [r for r in self.runs if r["split"] == "test" and float(r["epsilon"]) == epsilon and arm_of(r) == name]
        return sorted(found, key=lambda row: int(row["seed"]))

    def values(self, name: str, epsilon: float, column: str) -> list[float]:
        return [float(row[column]) for row in self.arm(name, epsilon)]

    def difference(self, a: str, b: str, epsilon: float, column: str) -> Interval:
        """Mean of a − b over seeds with its 95 % t interval."""
        pairs = [self.arm(name, epsilon) for name in (a, b)]
        seeds = [[row["seed"] for row in rows] for rows in pairs]
        if seeds[0] != seeds[1] or not seeds[0]:
            raise SystemExit(f"ε={epsilon}: {a} has seeds {seeds[0]}, {b} has {seeds[1]}. Run the plan 'judge' again.")
        return interval([float(x[column]) - float(y[column]) for x, y in zip(*pairs, strict=True)])

    def chosen(self, epsilon: float) -> str:
        """The baseline with the better validation accuracy at this ε."""
        rows = [validated(self.runs, start=self.prior, method=m, epsilon=str(epsilon)) for m in BASELINES]
        best = [max(float(row["accuracy"]) for row in each) for each in rows]
        return list(BASELINES)[best.index(max(best))]

    def better(self, epsilon: float, column: str) -> str:
        """The baseline that is better on the test set, by this column."""
        sign = 1 if column.endswith("accuracy") else -1
        return max(BASELINES, key=lambda m: sign * mean(self.values(m, epsilon, column)))


def arm_of(row: Row) -> str:
    if row["start"] == SCRATCH:
        return "scratch"
    if row["method"] in BASELINES:
        return row["method"]
    return "head first" if int(row["head_steps"]) else "prior"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float, digits: int) -> str:
    """With a minus sign of its own width."""
    return f"{value:.{digits}f}".replace("-", "−")


def spread(values: Sequence[float], digits: int, factor: float = 1.0) -> str:
    return f"{number(factor * mean(values), digits)} ± {factor * stdev(values):.{digits}f}"


def told(found: Interval, digits: int, factor: float = 1.0) -> str:
    low, middle, high = (number(factor * v, digits) for v in (found.low, found.mean, found.high))
    return f"{'+' if found.mean > 0 else ''}{middle} [{low}, {high}]"


def wrapped(text: str, first: str = "") -> str:
    return textwrap.fill(text, 118, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)


def over_epsilons(values: Sequence[str]) -> str:
    return " / ".join(values)


def test(r: Results) -> str:
    scores = (("accuracy", "accuracy", 2, 100.0), ("NLL", "tempered_nll", 3, 1.0), ("ECE", "tempered_ece", 4, 1.0))
    rows = []
    for name, title in ARMS.items():
        rates = [{row["lr"] for row in r.arm(name, e)} for e in EPSILONS]
        rate = over_epsilons([each.pop() for each in rates]) if rates[0] != rates[-1] else rates[0].pop()
        cells = [spread(r.values(name, e, c), digits, factor) for _, c, digits, factor in scores for e in EPSILONS]
        rows.append([title, rate, *cells])
    heads = [f"{title}, ε = {e:g}" for title, *_ in scores for e in EPSILONS]
    row = r.arm("prior", EPSILONS[0])[0]
    seeds = ", ".join(row["seed"] for row in r.arm("prior", EPSILONS[0]))
    about = (
        f"Trained on all {int(row['train_size']):,} training images; mean ± standard deviation over seeds {seeds}, which "
        "made no choice. NLL and ECE are after one temperature. DP-SGD (momentum 0.9) and DP-Adam average their weights "
        "as the recipe does. "
    )
    return wrapped(about + raw(r) + " " + provenance(r)) + "\n\n" + table(["", "rate", *heads], rows)


def raw(r: Results) -> str:
    """NLL and ECE before the temperature."""
    (n0, n1), (e0, e1), (t0, t1) = (
        (min(means), max(means))
        for column in ("nll", "ece", "temperature")
        for means in [[mean(r.values(name, e, column)) for name in ARMS for e in EPSILONS]]
    )
    return (
        f"Before the temperature, which is {t0:.1f} to {t1:.1f}, NLL is {n0:.2f} to {n1:.2f} and ECE "
        f"{e0:.2f} to {e1:.2f}."
    )


def bars(r: Results) -> str:
    rows = []
    for bar in r.bars:
        e, cells = float(bar["epsilon"]), []
        for name, column in BAR_COLUMNS.items():
            factor, digits = (100, 1) if name == "accuracy" else (1, 3)
            wanted, got = float(bar[name]), mean(r.values("head first", e, column))
            word = "met" if meets(name, wanted, got) else "missed"
            cells.append(f"{word}: {number(factor * got, digits)} for {SIGNS[name]} {factor * wanted:g}")
        for arm in ("head first", "prior"):
            gains = [r.difference(arm, m, e, "accuracy").mean for m in BASELINES]
            cells.append(over_epsilons([told_points(g) for g in gains]))
        rows.append([f"{e:g}", *cells])
    over = "points over DP-SGD / DP-Adam"
    return table(["ε", "accuracy, %", "NLL", "ECE", over, f"{over}, no head first"], rows)


def told_points(value: float) -> str:
    return f"{'+' if value > 0 else ''}{number(100 * value, 2)}"


#: The columns that bars are about, and what they demand.
BAR_COLUMNS = {"accuracy": "accuracy", "nll": "tempered_nll", "ece": "tempered_ece"}
SIGNS = {"accuracy": "≥", "nll": "<", "ece": "≤"}


def meets(name: str, wanted: float, got: float) -> bool:
    return {"≥": got >= wanted, "<": got < wanted, "≤": got <= wanted}[SIGNS[name]]


def paired(r: Results) -> str:
    scores = (("points", "accuracy", 2, 100.0), ("NLL", "tempered_nll", 3, 1.0))
    words = {"chosen": "baseline by validation", "better": "better baseline on the test set"}
    rows = []
    for a, b in PAIRS:
        cells = []
        for _, column, digits, factor in scores:
            for e in EPSILONS:
                other = {"chosen": r.chosen(e), "better": r.better(e, column)}.get(b, b)
                named = f" {BASELINES[other]}" if other in BASELINES else ""
                cells.append(told(r.difference(a, other, e, column), digits, factor) + named)
        rows.append([f"{a} − {words.get(b, b)}", *cells])
    return table(["", *(f"{title}, ε = {e:g}" for title, *_ in scores for e in EPSILONS)], rows)


#: What is compared: (arm, arm), where "chosen" and "better" are baselines.
PAIRS = (
    *(("head first", "chosen"), ("head first", "better"), ("prior", "chosen"), ("prior", "better")),
    *(("head first", "prior"), ("prior", "scratch")),
)


def parts(r: Results) -> str:
    """The recipe on validation images with one change at a time, from scratch, and with several changes (joint)."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in validated(r.runs, method="dp-steady"):
        groups.setdefault(tuple(row[name] for name in SETTING), []).append(row)
    test_row = r.arm("prior", EPSILONS[0])[0]
    plain = tuple(test_row[name] for name in SETTING)
    base = mean(float(row["accuracy"]) for row in groups[plain])
    rows = []
    for setting, found in sorted(groups.items(), key=lambda item: item[0] != plain):
        changed = {n: v for n, v, p in zip(SETTING, setting, plain, strict=True) if v != p}
        if len(changed) > 1 and found[0]["plan"] not in ("longer", "joint") and found[0]["start"] != SCRATCH:
            continue
        by_epsilon = {float(row["epsilon"]): row for row in found}
        accuracies = [float(by_epsilon[e]["accuracy"]) for e in EPSILONS]
        nlls = [float(by_epsilon[e]["tempered_nll"]) for e in EPSILONS]
        cells = [number(100 * v, 1) for v in accuracies] + [number(v, 3) for v in nlls]
        gain = told_points(mean(accuracies) - base) if changed else ""
        rows.append([found[0]["plan"], setting_words(changed) or "nothing", *cells, gain])
    heads = [f"ε = {e:g}" for e in EPSILONS] + [f"NLL, {e:g}" for e in EPSILONS]
    row = groups[plain][0]
    about = (
        f"Validation accuracy in %, NLL at the best temperature, and the mean gain over ε in points; seed {row['seed']}, "
        f"{int(row['train_size']):,} training images. The first row is the plain setting. `body` and `features` scale "
        "convolutions and hidden units (`starts.py`); `keep body` draws the hidden layer afresh. "
    )
    return wrapped(about + learned(r)) + "\n\n" + table(["plan", "changed", *heads, "mean gain"], rows)


def setting_words(changed: dict[str, str]) -> str:
    words = {"lr": "r", "head_steps": "head steps", "start": "from"}
    return ", ".join(f"{words.get(name, name)} {value}" for name, value in changed.items())


def learned(r: Results) -> str:
    """How the priors were learned, and how good their features are before private training."""
    probes = {row["prior"]: row for row in r.probe}
    columns = ("hidden_accuracy", "maps_accuracy")
    each = []
    for row in r.learning:
        accuracies = [f"{100 * float(probes[row['prior']][column]):.1f}" for column in columns]
        speed = f"{int(row['images_per_second']):,} images/s"
        each.append(f"`{row['prior']}` {int(row['steps']):,} steps, {speed}, {over_epsilons(accuracies)} %")
    seconds, images = (max(int(row[name]) for row in r.learning) for name in ("seconds", "images"))
    return (
        f"The priors were learned at once in {seconds} s, each from a pool of {images:,} images; steps, images made, and "
        f"accuracy of a linear probe, not private, on hidden units / feature maps: {'; '.join(each)}."
    )


def found(r: Results) -> str:
    """The first paragraph."""

    def accuracies(name: str) -> str:
        return over_epsilons([number(100 * mean(r.values(name, e, "accuracy")), 1) for e in EPSILONS])

    def gains(a: str, b: Callable[[float], str]) -> str:
        """Differences of accuracy, and at which ε their intervals lie above zero."""
        each = {e: r.difference(a, b(e), e, "accuracy") for e in EPSILONS}
        at = ", ".join(f"{e:g}" for e, d in each.items() if d.low > 0)
        points = over_epsilons([told_points(d.mean) for d in each.values()])
        return f"{points} points (95 % interval above zero at {'ε = ' + at if at else 'no ε'})"

    def rival(epsilon: float) -> str:
        return r.better(epsilon, "accuracy")

    held = [
        meets(name, float(bar[name]), mean(r.values("head first", float(bar["epsilon"]), column)))
        for bar in r.bars
        for name, column in BAR_COLUMNS.items()
    ]
    steps = next(int(row["steps"]) for row in r.learning if row["prior"] == r.prior)
    return (
        wrapped(
            f"At ε = {over_epsilons([f'{e:g}' for e in EPSILONS])} the recipe has {accuracies('scratch')} % accuracy on the "
            f"CIFAR-10 test set from scratch and {accuracies('prior')} % from a prior (`{r.prior}`, {steps:,} steps on "
            f"synthetic images). Training the logits first gives {accuracies('head first')} %. These are means over "
            f"{len(r.arm('prior', EPSILONS[0]))} seeds. The prior is worth {gains('prior', lambda e: SCRATCH)}. Against the "
            "better baseline on the test set, from the same prior, the recipe with head first has "
            f"{gains('head first', rival)}, but the baselines had no such phase. Without it the recipe has "
            f"{gains('prior', rival)}. Of the {len(held)} bars for accuracy, NLL and ECE with this network, "
            f"{sum(held)} are met."
        )
        + "\n\n"
        + settings(r)
    )


def settings(r: Results) -> str:
    """What all test rows have in common."""
    row, scratch, phased = (r.arm(name, EPSILONS[0])[0] for name in ("prior", "scratch", "head first"))
    return wrapped(
        f"The recipe is `{row['method']}` with rate r = {row['lr']} from a prior and {scratch['lr']}, its default, from "
        f"scratch; δ = {row['delta']}, C = {float(row['max_grad_norm']):g}, Poisson batches of {int(row['batch']):,}, "
        f"{row['epochs']} epochs, RDP accounting. 'Head first' trains the logits alone for {phased['head_steps']} of "
        f"{int(phased['steps']):,} steps on the prior's hidden units, then all weights; σ is calibrated to all steps."
    )


def caveats(r: Results) -> str:
    """The caveats that have numbers."""
    tried = {tuple(row[n] for n in SETTING) for row in validated(r.runs, start=r.prior, method="dp-steady")}
    edges, counts = [], []
    for method, title in BASELINES.items():
        grid = sorted({float(row["lr"]) for row in validated(r.runs, start=r.prior, method=method)})
        at = [f"{e:g}" for e in EPSILONS if best_rate(r.runs, r.prior, method, e) in (grid[0], grid[-1])]
        counts.append(f"{title} {len(grid)}")
        edges.append(f"{title} at {'ε = ' + ', '.join(at) if at else 'no ε'}")
    p = mean(float(row["accuracy"]) for row in validated(r.runs, start=r.prior))
    error = 100 * math.sqrt(p * (1 - p) / SCORED)
    tta = [
        over_epsilons([number(f * mean(r.values("head first", e, c)), d) for e in EPSILONS])
        for c, f, d in (("tta_accuracy", 100, 1), ("tta_nll", 1, 3), ("tta_ece", 1, 3))
    ]
    rivals = [100 * mean(r.values(r.better(e, "tta_accuracy"), e, "tta_accuracy")) for e in EPSILONS]
    items = [
        f"From `{r.prior}` the recipe had {len(tried)} settings on validation images, {' and '.join(counts)}. The best "
        f"rate lies at an end of the grid for {'; '.join(edges)}. Wider grids may help the baselines.",
        f"Choices rest on one seed and {SCORED:,} images: one accuracy has a standard error of {error:.1f} points.",
        "Test-time averaging over ten shifted and mirrored copies is in no table above. With it, head first has "
        f"{tta[0]} %, NLL {tta[1]}, ECE {tta[2]}; the better baseline has "
        f"{over_epsilons([number(v, 1) for v in rivals])} %.",
        prototype(r),
    ]
    return "\n".join(wrapped(item, "- ") for item in items)


def prototype(r: Results) -> str:
    """What a prior that was learned for longer had."""
    (steps,) = {int(row["prototype_steps"]) for row in r.bars}
    before = over_epsilons([number(100 * float(row["prototype_accuracy"]), 1) for row in r.bars])
    now = over_epsilons([number(100 * mean(r.values("prior", e, "accuracy")), 1) for e in EPSILONS])
    own = next(int(row["steps"]) for row in r.learning if row["prior"] == r.prior)
    return (
        f"A prototype with {steps:,} steps on dead leaves had {before} % on the test set without head first (one seed); "
        f"`{r.prior}` with {own:,} steps has {now} %. The images differ too."
    )


def provenance(r: Results) -> str:
    values = {name: sorted({row[name] for row in r.runs}) for name in ("device", "torch", "precision", "commit")}
    minutes = sum(float(row["seconds"]) for row in r.runs) / 60
    kinds = ", ".join(f"{name} {' and '.join(each)}" for name, each in values.items())
    return f"All {len(r.runs)} rows took {minutes:.0f} minutes of training: {kinds}."


BLOCKS: dict[str, Callable[[Results], str]] = {b.__name__: b for b in (found, bars, test, paired, parts, caveats)}


def filled(text: str, results: Results) -> str:
    """The text with every block made anew."""
    for name, block in BLOCKS.items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise SystemExit(
                f"README.md: needs '<!-- begin {name} -->' and '<!-- end {name} -->' once. Add the markers."
            )
        begin, end = pattern.findall(text)[0]
        before, after = pattern.split(text)[0], pattern.split(text)[-1]
        text = f"{before}{begin}{block(results)}\n{end}{after}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="the folder of the tables")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file would change")
    a = parser.parse_args()
    text = a.readme.read_text()
    made = filled(text, Results.read(a.results))
    if a.check and made != text:
        raise SystemExit(f"{a.readme}: is not what {a.results} gives. Run this command without --check.")
    if not a.check:
        a.readme.write_text(made)


if __name__ == "__main__":
    main()
