"""The leaderboard: networks, starts and methods at five ε. Writes its tables into README.md, and a figure.

python -m experiments.leaderboard.board            # README.md, results/board.png and docs/images/priors-scores.png
python -m experiments.leaderboard.board --check    # fails if the page is not what the tables give
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from dpivon.report.figures import STYLE, save
from experiments.leaderboard.linear import ALL_MAPS
from experiments.leaderboard.priors import tables
from experiments.leaderboard.priors.arms import METHODS, number, table, told, wrapped
from experiments.leaderboard.priors.digits import unpaired
from experiments.leaderboard.priors.plans import BOARD, IVON, SCRATCH, Row
from experiments.strong_privacy.recipe import RATE

HERE = Path(__file__).parent
TITLES = METHODS | {IVON: "DP-IVON-Gradsq"}
#: Title, column without a temperature and with one, factor, digits.
SCORES = (("NLL", "nll", "tempered_nll", 1.0, 3), ("ECE", "ece", "tempered_ece", 1.0, 3))
FASHION = (("Accuracy, %", "accuracy", 100.0, 1), ("NLL with one temperature", "tempered_nll", 1.0, 3))
LOOKS = {"dp-steady": ("#0072B2", "D"), "dp-sgd": ("#D55E00", "^"), "dp-adam": ("#009E73", "v"), IVON: ("#CC79A7", "s")}
#: A last layer alone, on the prior's flat features of all maps, and of the last map; how its networks are called in linear.csv.
LAST, OLDER, NETWORKS = (
    "prior, last layer",
    "prior, last layer on the last map",
    {"paper": "paper's CNN", "wide": "WRN-16-4"},
)
LINES = {"scratch": "--", "prior": "-", LAST: ":"}
#: Accuracy, NLL and ECE that were aimed at, by network and ε.
BARS = {
    "paper": {"1": (0.66, 0.98, 0.02), "3": (0.71, 0.84, 0.02), "7.5": (0.74, 0.76, 0.02)},
    "wide": {"1": (0.725, None, None), "3": (0.79, None, None), "8": (0.82, None, None)},
}
PANELS = (("accuracy", "test accuracy, %", 100.0), ("tempered_nll", "test NLL after one temperature", 1.0))
#: Network, where it starts, method; and its rows by ε.
Arm = tuple[str, str, str]
Arms = dict[Arm, dict[float, list[Row]]]


def arms() -> tuple[Arms, Arms]:
    """On CIFAR-10's test set, and on that of Fashion-MNIST."""
    small = tables.read(HERE / "priors/results/runs.csv")
    wide = tables.read(HERE / "wide/results/wide-runs.csv")
    cifar: Arms = {}
    for row in small:
        if row["split"] == "test" and row["plan"] in ("board", "final"):
            _add(cifar, ("paper's CNN", "scratch" if row["start"] == SCRATCH else "prior", row["method"]), row)
    long = [row for row in wide if row["split"] == "test" and row["places"] == "4"]
    for row in long:
        if int(row["steps"]) == max(int(other["steps"]) for other in long):
            _add(cifar, ("WRN-16-4", "prior", row["method"]), row)
    for row in linear():
        mean_only = {name: row[f"mean_{name}"] for name in ("accuracy", *(s for _, *two, _, _ in SCORES for s in two))}
        start = LAST if row["features"] == ALL_MAPS[row["network"]] else OLDER
        _add(cifar, (NETWORKS[row["network"]], start, row["method"]), row | mean_only)
    for row in tables.read(HERE.parent / "posterior/results/rows.csv"):
        if (row["predictor"], row["condition"], row["charged"]) == ("mean", "clean", "0") and row["map"] != "vector":
            _add_scored(cifar, row)
    fashion: Arms = {}
    for row in small:
        if row["split"] == "fashion-mnist":
            _add(fashion, ("paper's CNN", "scratch" if row["start"] == SCRATCH else "prior", row["method"]), row)
    return dict(sorted(cifar.items())), dict(sorted(fashion.items()))


def linear() -> list[Row]:
    """Runs of a last layer alone on the test set, of the default plan; the recipe's at its default rate."""
    plan = {"split": "test", "batch": "4096", "epochs": "90"}
    rows = [r for r in tables.read(HERE / "results/linear.csv") if all(r[name] == v for name, v in plan.items())]
    rows = [r for r in rows if r["network"] in NETWORKS]
    return [row for row in rows if (row["method"] == "dp-steady") == (row["lr"] == "")]


def _add(found: Arms, arm: Arm, row: Row) -> None:
    epsilon = float(row["epsilon"])
    if epsilon in BOARD:
        found.setdefault(arm, {}).setdefault(epsilon, []).append(row)


def _add_scored(found: Arms, row: Row) -> None:
    """A row of experiments/posterior, which has one for each map of a run."""
    arm, tempered = ("paper's CNN", "scratch", row["method"]), row["map"] == "temperature"
    if float(row["epsilon"]) not in BOARD:
        return
    known = found.setdefault(arm, {}).setdefault(float(row["epsilon"]), [])
    mine = next((own for own in known if own["seed"] == row["seed"]), None)
    if mine is None:
        known.append(mine := {name: row[name] for name in ("seed", "accuracy", "seconds", "device", "torch", "commit")})
    mine |= {("tempered_" if tempered else "") + name: row[name] for name in ("nll", "ece")}


def _score(rows: Sequence[Row], column: str, factor: float, digits: int) -> str:
    values = [factor * float(row[column]) for row in rows]
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return number(mean(values), digits) + spread if values else "–"


def _lines(found: Arms, epsilons: Sequence[float], cell: Callable[[Sequence[Row]], str]) -> str:
    titles = ["network", "start", "method", *(f"ε = {e:g}" for e in epsilons)]
    return table(
        titles, [[*arm[:2], TITLES[arm[2]], *(cell(own.get(e, [])) for e in epsilons)] for arm, own in found.items()]
    )


def accuracy() -> str:
    """One view, in %."""
    return _lines(arms()[0], BOARD, lambda rows: _score(rows, "accuracy", 100.0, 1))


def bars() -> str:
    """The recipe's last layer as a user gets it, draws and charged temperature, beside what was aimed at."""
    lines = []
    for network, aims in BARS.items():
        for e, aim in aims.items():
            wanted = network, ALL_MAPS[network], e, "dp-steady"
            rows = [r for r in linear() if (r["network"], r["features"], r["epsilon"], r["method"]) == wanted]
            cells = [_against(rows, *each) for each in zip(("accuracy", "nll", "ece"), aim, strict=True)]
            lines.append([NETWORKS[network], e, str(len(rows)), *cells])
    return table(["network", "ε", "seeds", "accuracy, %", "NLL", "ECE"], lines)


def _against(rows: Sequence[Row], column: str, aim: float | None) -> str:
    if not rows:
        return "not run"
    factor, digits, sign = (100.0, 1, "≥") if column == "accuracy" else (1.0, 3, "≤" if column == "ece" else "<")
    own = mean(float(row[column]) for row in rows)
    if aim is None:
        return _score(rows, column, factor, digits)
    met = own >= aim if column == "accuracy" else own < aim + (1e-12 if column == "ece" else 0.0)
    wanted = number(factor * aim, digits)
    close = not met and number(factor * own, digits) == wanted  # a miss that rounding would hide
    return f"{'met' if met else 'missed'}: {_score(rows, column, factor, digits + close)} for {sign} {wanted}"


def calibration() -> str:
    """NLL and ECE, raw and with one temperature."""
    parts = []
    for title, *columns, factor, digits in SCORES:
        cell = partial(_arrow, columns=columns, factor=factor, digits=digits)
        parts.append(f"{title}, raw → with one temperature:\n\n{_lines(arms()[0], BOARD, cell)}")
    return "\n\n".join(parts)


def _arrow(rows: Sequence[Row], columns: Sequence[str], factor: float, digits: int) -> str:
    means = (number(factor * mean(float(row[column]) for row in rows), digits) for column in columns)
    return " → ".join(means) if rows else "–"


def fashion() -> str:
    """Accuracy and NLL of the recipe on Fashion-MNIST."""
    parts = []
    for title, column, factor, digits in FASHION:
        cell = partial(_score, column=column, factor=factor, digits=digits)
        parts.append(f"{title}:\n\n{_lines(arms()[1], (1.0, 3.0, 8.0), cell)}")
    return "\n\n".join(parts)


def gains() -> str:
    """What the prior adds to each method with the paper's CNN; 'last layer' on ten copies of an image."""
    found = arms()[0]
    lines = []
    for method, title in TITLES.items():
        both = [found.get(("paper's CNN", start, method), {}) for start in ("prior", "scratch")]
        pairs = [[[100 * float(row["accuracy"]) for row in own.get(e, [])] for own in both] for e in BOARD]
        lines.append([title, *(told(unpaired(*pair), 1) if all(pair) else "–" for pair in pairs)])
    for start in (OLDER, LAST):
        last, scratch = (found.get(("paper's CNN", each, "dp-steady"), {}) for each in (start, "scratch"))
        pairs = [[[100 * float(row["accuracy"]) for row in own.get(e, [])] for own in (last, scratch)] for e in BOARD]
        several = [len(pair[0]) > 1 for pair in pairs]
        cells = (told(unpaired(*pair), 1) if more else "–" for pair, more in zip(pairs, several, strict=True))
        lines.append([start.replace("prior", "recipe"), *cells])
    return table(["points of accuracy", *(f"ε = {e:g}" for e in BOARD)], lines)


def maps() -> str:
    """What earlier maps add to the recipe's last layer."""
    found, lines = arms()[0], []
    for network in NETWORKS.values():
        both = [found.get((network, start, "dp-steady"), {}) for start in (LAST, OLDER)]
        pairs = [[[100 * float(row["accuracy"]) for row in own.get(e, [])] for own in both] for e in BOARD]
        cells = (told(unpaired(*pair), 1) if min(map(len, pair)) > 1 else "–" for pair in pairs)
        lines.append([f"{network}, points", *cells])
    return table(["all maps less the last", *(f"ε = {e:g}" for e in BOARD)], lines)


def flatness() -> str:
    """The recipe on flat features of the paper's CNN, and on the same ones scaled one by one, on validation images."""
    found: dict[tuple[str, float], dict[str, Row]] = {}
    for row in tables.read(HERE / "results/linear.csv"):
        own = row["network"] in ("paper", "plain") and row["features"] == ALL_MAPS["paper"]
        if own and (row["split"], row["method"]) == ("validation", "dp-steady"):
            found.setdefault((row["network"], float(row["lr"] or RATE)), {})[row["epsilon"]] = row
    epsilons = sorted(next(iter(found.values())), key=float)
    lines = []
    for (network, rate), by_epsilon in sorted(found.items()):
        rows = [by_epsilon[e] for e in epsilons]
        scores = [f"{100 * float(row['mean_accuracy']):.1f}, {float(row['mean_tempered_nll']):.3f}" for row in rows]
        lines.append(["flat" if network == "paper" else "scaled one by one", f"{rate:g}", *scores])
    return table(["features", "r", *(f"ε = {e}" for e in epsilons)], lines)


def others() -> str:
    """The recipe less each other method on the same features, at the rate that this had the best validation accuracy with."""
    found: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in linear():
        if row["features"] == ALL_MAPS[row["network"]]:
            found.setdefault((row["network"], row["method"]), {}).setdefault(row["epsilon"], []).append(row)
    lines = []
    for (network, method), theirs in sorted(found.items()):
        for epsilon, rows in sorted(theirs.items(), key=lambda one: float(one[0])):
            if method != "dp-steady":
                ours = found[network, "dp-steady"][epsilon]
                scores = ("mean_accuracy", 100.0, 2), ("mean_tempered_nll", 1.0, 3)
                pairs = [[[factor * float(r[name]) for r in own] for own in (ours, rows)] for name, factor, _ in scores]
                cells = [told(unpaired(*pair), digits) for pair, (*_, digits) in zip(pairs, scores, strict=True)]
                lines.append([NETWORKS[network], TITLES[method], epsilon, rows[0]["lr"], *cells])
    return table(["network", "the recipe less", "ε", "its rate", "points of accuracy", "NLL"], lines)


def flat() -> str:
    """Runs of experiments.leaderboard.flat by arm beside the layer alone, and what they add to it on the test set."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in tables.read(HERE / "results/linear.csv"):
        if row["features"] == ALL_MAPS[row["network"]] and (row["method"], row["lr"]) == ("dp-steady", ""):
            own = row["split"], row["network"], row["epsilon"], "last layer", "", "", ""
            found.setdefault(own, []).append(row | {"head_accuracy": ""})
    for row in tables.read(HERE / "results/flat.csv"):
        own = (
            row["split"],
            row["network"],
            f"{float(row['epsilon']):g}",
            "all weights",
            row["lr"],
            row["share"],
            row["steps"],
        )
        found.setdefault(own, []).append(row)
    trained = {key[:3] for key in found if key[3] == "all weights"}
    lines = []
    for key in sorted(
        found, key=lambda key: (key[0] == "test", key[1], float(key[2]), key[3] != "last layer", key[4:])
    ):
        if key[:3] in trained:
            rows, (split, network, *arm) = found[key], key
            scores = [
                _score(rows, name, *shown)
                for name, *shown in (("accuracy", 100.0, 1), ("nll", 1.0, 3), ("ece", 1.0, 3))
            ]
            lines.append([split, NETWORKS[network], *arm, str(len(rows)), *scores])
    titles = ["split", "network", "ε", "trained", "r", "head's share of ε", "T", "runs", "accuracy, %", "NLL", "ECE"]
    gains = []
    for key in sorted(key for key in found if key[0] == "test" and key[3] == "all weights"):
        both = found[key], found[*key[:3], "last layer", "", "", ""]
        shown = ("accuracy", 100.0, 1), ("nll", 1.0, 3), ("ece", 1.0, 3)
        pairs = [[[factor * float(row[name]) for row in rows] for rows in both] for name, factor, _ in shown]
        cells = [told(unpaired(*pair), digits) for pair, (*_, digits) in zip(pairs, shown, strict=True)]
        gains.append([f"{NETWORKS[key[1]]}, all weights", key[2], *cells])
    less = table(["less the last layer", "ε", "points of accuracy", "NLL", "ECE"], gains)
    return f"{table(titles, lines)}\n\n{less}"


def provenance() -> str:
    rows = [row for found in arms() for own in found.values() for each in own.values() for row in each]
    kinds = {name: sorted({row[name] for row in rows if row.get(name)}) for name in ("device", "torch", "commit")}
    minutes = sum(float(row["seconds"]) for row in rows) / 60
    said = ", ".join(f"{name} {', '.join(each)}" for name, each in kinds.items())
    return wrapped(f"{len(rows)} runs, {minutes:.0f} minutes of training: {said}. δ = 1e-5, C = 1.")


BLOCKS: dict[str, Callable[[], str]] = {
    f.__name__: f for f in (bars, accuracy, gains, maps, flatness, others, flat, calibration, fashion, provenance)
}


def filled(text: str) -> str:
    for name, make in BLOCKS.items():
        found = list(re.finditer(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", text, re.DOTALL))
        if len(found) != 1:
            markers = f"'<!-- begin {name} -->' and '<!-- end {name} -->'"
            raise SystemExit(f"README.md: needs {markers} once. Add the markers.")
        text = f"{text[: found[0].end(1)]}{make()}\n{text[found[0].start(2) :]}"
    return text


def draw(path: Path) -> None:
    """The paper's CNN by method, dashed from scratch, solid from the prior, dotted its last layer; WRN-16-4 in black."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.4, 4.8), layout="constrained", dpi=110)
        axes: Any = figure.subplots(1, len(PANELS))
        for axis, (column, title, factor) in zip(axes, PANELS, strict=True):
            for (network, start, method), own in arms()[0].items():
                if start == OLDER or (start == LAST and method != "dp-steady"):  # as good: in the table alone
                    continue
                colour, marker = LOOKS[method] if network == "paper's CNN" else ("#000000", "o")
                line, x = LINES[start], sorted(own)
                y = [factor * mean(float(row[column]) for row in own[e]) for e in x]
                label = f"{network}, {TITLES[method]}, {start}"
                axis.plot(x, y, color=colour, marker=marker, linestyle=line, linewidth=1.2, markersize=4.5, label=label)
            axis.set_xscale("log")
            axis.set_xticks(BOARD, [f"{e:g}" for e in BOARD])
            axis.minorticks_off()
            axis.set_xlabel("ε (δ = 1e-5)")
            axis.set_ylabel(title)
            axis.grid(alpha=0.25)
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8
        )
        save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    page, checked = HERE / "README.md", parser.parse_args().check
    text = page.read_text()
    made = filled(text)
    if checked:
        raise SystemExit(0 if made == text else "README.md is not what the tables give. Run without --check.")
    page.write_text(made)
    for path in (HERE / "results" / "board", HERE.parents[1] / "docs" / "images" / "priors-scores"):
        draw(path)


if __name__ == "__main__":
    main()
