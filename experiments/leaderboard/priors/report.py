"""Write the result tables into README.md and choices.md, between their markers, and draw the figure.

    python -m experiments.leaderboard.priors.report            # both pages, results/scores.png
    python -m experiments.leaderboard.priors.report --check    # fails if a page is not what the tables give

A block lies between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; :data:`FILES` has the names.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

from experiments.leaderboard.priors import choices
from experiments.leaderboard.priors.arms import (
    ARMS,
    BASELINES,
    CHARGED,
    CHARGED_VECTOR,
    FREE,
    METHODS,
    NONE,
    RECIPE,
    SEEN,
    VECTOR,
    Results,
    number,
    over_epsilons,
    paired_interval,
    signed,
    table,
    told,
    wrapped,
)
from experiments.leaderboard.priors.digits import judged, rates
from experiments.leaderboard.priors.digits_worth import worth
from experiments.leaderboard.priors.figure import draw
from experiments.leaderboard.priors.plans import EPSILONS, Row
from experiments.leaderboard.priors.predictions import WIDTHS
from experiments.strong_privacy.compare.statistics import Interval

HERE = Path(__file__).parent
#: Title, column of a run, column of a prediction, digits, factor.
SCORES = (
    ("points", "accuracy", "accuracy", 2, 100.0),
    ("NLL", "tempered_nll", "nll", 3, 1.0),
    ("ECE", "tempered_ece", "ece", 3, 1.0),
)
HEADS = [f"{title}, ε = {e:g}" for title in ("accuracy", "NLL", "ECE") for e in EPSILONS]
PREDICTORS = {"mean": "one view", "tta": "ten views"}
#: What the bars demand, and of which column.
SIGNS = {"accuracy": "≥", "nll": "<", "ece": "≤"}


def percent(values: list[float]) -> str:
    return number(100 * mean(values), 1)


def accuracies(r: Results, arm: str) -> str:
    return over_epsilons(lambda e: percent(r.values(arm, e, "accuracy")))


def found(r: Results) -> str:
    """The first paragraphs."""
    against = {e: r.difference(RECIPE, r.better(e), e, "accuracy") for e in EPSILONS}
    ahead = [f"{e:g}" for e, d in against.items() if d.low > 0]
    claim = f"an advantage at ε = {', '.join(ahead)}" if ahead else "no advantage"

    def before(arm: str) -> str:
        other = {e: r.better(e, "plain ") for e in EPSILONS}
        return over_epsilons(lambda e: signed(100 * r.difference(arm, other[e], e, "accuracy").mean, 2))

    held = sum(meets(name, bar, CHARGED, r) for bar in r.bars for name in SIGNS)
    first = (
        f"**From the same prior, with the same head-first phase, the recipe shows {claim} over DP-SGD and DP-Adam with rates "
        "tuned at each ε.** Accuracy on the CIFAR-10 test set at ε = "
        f"{over_epsilons(lambda e: f'{e:g}')}, mean over three seeds: recipe {accuracies(r, RECIPE)} %, DP-SGD "
        f"{accuracies(r, 'dp-sgd')} %, DP-Adam {accuracies(r, 'dp-adam')} %. Against the better of the two on the test set "
        f"that is {over_epsilons(lambda e: signed(100 * against[e].mean, 2))} points, and with averaging over ten views "
        f"{over_epsilons(lambda e: signed(100 * least_lead(r, e), 2))}. An earlier comparison here "
        f"had {before('untuned')}, but gave head first to the recipe alone and the baselines two or three rates; with head "
        f"first for none it was {before('plain')}."
    )
    worth = {e: r.difference("plain", "scratch", e, "accuracy") for e in EPSILONS}
    gain = over_epsilons(lambda e: signed(100 * worth[e].mean, 2))
    sure = ", ".join(f"{e:g}" for e in EPSILONS if worth[e].low > 0)
    second = (
        f"The prior itself helps. From scratch the recipe has {accuracies(r, 'scratch')} %; the prior adds {gain} points "
        f"(95 % interval above zero at ε = {sure}), and head first adds more for every method. Self-supervision for "
        f"{factor(r):.1f} times as many steps did not help, nor did a richer mixture of images or another hidden layer. "
        "Draws around the mean are no better than the mean, once both have a temperature. Charging that temperature changes "
        f"NLL by at most {most(r, CHARGED, FREE):.4f}. Of the {len(SIGNS) * len(r.bars)} bars for accuracy, "
        f"NLL and ECE with this network, {held} are met."
    )
    return f"{wrapped(first)}\n\n{wrapped(second)}\n\n{wrapped(settings(r))}"


def least_lead(r: Results, epsilon: float) -> float:
    """Accuracy with ten views less that of the better baseline."""
    return min(prediction_difference(r, epsilon, "tta", method, "accuracy").mean for method in BASELINES)


def factor(r: Results) -> float:
    steps = {row["prior"]: int(row["steps"]) for row in r.learning}
    return steps[f"{r.prior}-long"] / steps[r.prior]


def settings(r: Results) -> str:
    """What test rows have in common."""
    row, scratch, plain = (r.arm(name, EPSILONS[0])[0] for name in (RECIPE, "scratch", "plain"))
    return (
        f"The recipe is `{row['method']}`, with rate r = {row['lr']} after head first, {plain['lr']} without, and "
        f"{scratch['lr']} from scratch; one r serves all ε. δ = {row['delta']}, C = {float(row['max_grad_norm']):g}, Poisson "
        f"batches of {int(row['batch']):,}, {row['epochs']} epochs, RDP accounting. 'Head first' trains the logits alone for "
        f"{row['head_steps']} of {int(row['steps']):,} steps, by the recipe in all arms, then all weights by the arm's "
        "method. σ covers both phases and, in the last three arms below, the charged calibration."
    )


def meets(name: str, bar: Row, fit: tuple[str, str, str], r: Results, predictor: str = "mean") -> bool:
    wanted, got = float(bar[name]), r.score(RECIPE, float(bar["epsilon"]), (predictor, *fit), name)
    return reached(name, wanted, got)


def reached(name: str, wanted: float, got: float) -> bool:
    return {"≥": got >= wanted, "<": got < wanted, "≤": got <= wanted}[SIGNS[name]]


def bars(r: Results) -> str:
    rows = []
    for bar in r.bars:
        e, cells = float(bar["epsilon"]), []
        for name in SIGNS:
            scale, digits = (100, 1) if name == "accuracy" else (1, 3)
            got = {p: number(scale * r.score(RECIPE, e, (p, *CHARGED), name), digits) for p in PREDICTORS}
            words = ["met" if meets(name, bar, CHARGED, r, p) else "missed" for p in PREDICTORS]
            verdict = words[0] if len(set(words)) == 1 else " / ".join(words)
            cells.append(f"{verdict}: {' / '.join(got.values())} for {SIGNS[name]} {scale * float(bar[name]):g}")
        rows.append([f"{e:g}", *cells])
    return table(["ε", "accuracy, %", "NLL", "ECE"], rows)


def prediction_difference(r: Results, epsilon: float, predictor: str, method: str, column: str) -> Interval:
    """The recipe less another method, both with the charged temperature."""
    a, b = (r.predicted(m, epsilon, (predictor, *CHARGED)) for m in (RECIPE, method))
    return paired_interval(a, b, column, f"recipe and {method} at ε={epsilon}")


def test(r: Results) -> str:
    rows = []
    for name, title in ARMS.items():
        rates = [r.arm(name, e)[0]["lr"] for e in EPSILONS]
        cells = [
            f"{number(f * mean(v), d)} ± {f * stdev(v):.{d}f}"
            for _, column, _, d, f in SCORES
            for e in EPSILONS
            for v in [r.values(name, e, column)]
        ]
        rows.append([title, rates[0] if len(set(rates)) == 1 else " / ".join(rates), *cells])
    row = r.arm(RECIPE, EPSILONS[0])[0]
    seeds = ", ".join(row["seed"] for row in r.arm(RECIPE, EPSILONS[0]))
    about = (
        f"Trained on all {int(row['train_size']):,} training images; mean ± standard deviation over seeds {seeds}, which "
        "made no choice. NLL and ECE are after one temperature, not charged, fitted alike in all arms. DP-SGD (momentum "
        f"0.9) and DP-Adam average their weights as the recipe does. {provenance(r)}"
    )
    return wrapped(about) + "\n\n" + table(["", "rate", *HEADS], rows)


def provenance(r: Results) -> str:
    values = {name: sorted({row[name] for row in r.runs}) for name in ("device", "torch", "precision", "commit")}
    minutes = sum(float(row["seconds"]) for row in r.runs) / 60
    kinds = ", ".join(f"{name} {', '.join(each)}" for name, each in values.items())
    return f"All {len(r.runs)} runs took {minutes:.0f} minutes of training: {kinds} (`+1`: with the change of the next commit)."


#: What is compared by every score, and by accuracy alone.
RIVALS = ((RECIPE, "dp-sgd"), (RECIPE, "dp-adam"))
STEPS = ((RECIPE, "plain"), ("dp-sgd", "plain dp-sgd"), ("dp-adam", "plain dp-adam"), ("plain", "scratch"))


def paired(r: Results) -> str:
    rows, found = [], []
    for a, b in (*RIVALS, *STEPS):
        for title, column, _, digits, scale in SCORES if (a, b) in RIVALS else SCORES[:1]:
            each = [r.difference(a, b, e, column) for e in EPSILONS]
            found += each if (a, b) in RIVALS else []
            rows.append([f"{ARMS[a]} − {ARMS[b]}", title, *(told(d, digits, scale) for d in each)])
    sure = sum(d.low > 0 or d.high < 0 for d in found)
    about = (
        "Paired differences over seeds with 95 % t intervals, not corrected for their number: of the "
        f"{len(found)} between recipe and baselines with head first, {sure} exclude{'s' * (sure == 1)} zero. "
        "Runs with one seed share no noise and no batches, so pairing removes no variance. Lower NLL and ECE are better. "
        "The rows 'head first − prior' also differ in rates and `features`."
    )
    return wrapped(about) + "\n\n" + table(["", "score", *(f"ε = {e:g}" for e in EPSILONS)], rows)


def widths(r: Results, epsilon: float, fit: tuple[str, str, str]) -> dict[str, float]:
    """Validation NLL of draws, by width."""
    names = [f"draws {kind} {width:g}" for kind, each in WIDTHS.items() for width in each]
    return {name: r.score(RECIPE, epsilon, (name, *fit), "nll", "settle") for name in names}


def posterior(r: Results) -> str:
    rows, better = [], 0
    for fit, words in ((NONE, "raw"), (FREE, "each with its temperature")):
        every = {e: widths(r, e, fit) for e in EPSILONS}
        chosen = {e: min(every[e], key=every[e].__getitem__) for e in EPSILONS}
        if fit == FREE:
            alone = {e: r.score(RECIPE, e, ("draws none", *fit), "nll", "settle") for e in EPSILONS}
            better = sum(value < alone[e] for e in EPSILONS for value in every[e].values())
        for title, _, column, digits, scale in SCORES:
            cells = []
            for e in EPSILONS:
                a, b = (r.predicted(RECIPE, e, (name, *fit)) for name in (chosen[e], "draws none"))
                cells.append(told(paired_interval(a, b, column, f"draws at ε={e}"), digits, scale))
            rows.append([words, title, *cells])
        rows[-len(SCORES)][0] += (
            f"; width {', '.join(dict.fromkeys(c.removeprefix('draws ') for c in chosen.values()))}"
        )
    count = sum(len(each) for each in WIDTHS.values())

    def raw(e: float) -> str:
        tried = widths(r, e, NONE)
        return number(r.score(RECIPE, e, (min(tried, key=tried.__getitem__), *NONE), "nll"), 3)

    def tempered(e: float) -> str:
        return number(r.score(RECIPE, e, ("draws none", *FREE), "nll"), 3)

    about = (
        "Draws less mean of the same run on the test set: 16 draws of a Gaussian around the averaged weights, three seeds, "
        f"95 % t intervals. The width is the best of {count} by NLL on validation images (seed 4), at each ε. Raw draws are "
        f"better calibrated than the raw mean but less accurate, and their NLL of {over_epsilons(raw)} is above the "
        f"{over_epsilons(tempered)} of the mean with one temperature. With a temperature, {better} of "
        f"{count * len(EPSILONS)} width-and-ε pairs have a lower validation NLL than the mean. `one` is a share of the "
        "weights' root mean square. Its 0.4 is the widest that was tried, 0.1 the narrowest."
    )
    return wrapped(about) + "\n\n" + table(["", "score", *(f"ε = {e:g}" for e in EPSILONS)], rows)


def calibration(r: Results) -> str:
    seen, mirrored = "training images", "mirrored"
    words = {
        NONE: ["none", "", ""],
        SEEN: ["temperature", seen, ""],
        FREE: ["temperature", mirrored, ""],
        CHARGED: ["temperature", mirrored, "yes"],
        VECTOR: ["vector", mirrored, ""],
        CHARGED_VECTOR: ["vector", mirrored, "yes"],
    }
    every = [(RECIPE, "mean", fit) for fit in words] + [(RECIPE, "tta", CHARGED)]
    every += [(method, predictor, CHARGED) for method in BASELINES for predictor in PREDICTORS]
    rows = [
        [METHODS[method], PREDICTORS[predictor], *words[fit], *prediction_cells(r, method, (predictor, *fit))]
        for method, predictor, fit in every
    ]
    known = {
        fit: mean(r.score(RECIPE, e, (p, *fit), "nll", "settle") for e in EPSILONS for p in PREDICTORS)
        for fit in (CHARGED, CHARGED_VECTOR)
    }
    name = words[min(known, key=known.__getitem__)][0]
    about = (
        "Mean over three seeds on the test set. A map fitted on mirrored training images has the lower ECE, since the "
        f"network has seen the images themselves. Vector scaling gains at most {most(r, FREE, VECTOR):.4f} of NLL, and noise "
        f"undoes that; validation NLL (seed 4) prefers the charged {name}. Ten views average log-probabilities over "
        "shifted and mirrored copies. "
        f"They help every method: {'; '.join(f'{t} {views_gain(r, m)}' for m, t in METHODS.items())} points. With them the "
        f"recipe has {'; '.join(f'{lead(r, m)} points over {t}' for m, t in BASELINES.items())}."
    )
    return wrapped(about) + "\n\n" + table(["method", "predictor", "map", "fitted on", "charged", *HEADS], rows)


def most(r: Results, a: tuple[str, str, str], b: tuple[str, str, str]) -> float:
    """The largest difference over ε between the recipe's NLL with one view under two maps."""
    return max(abs(r.score(RECIPE, e, ("mean", *a), "nll") - r.score(RECIPE, e, ("mean", *b), "nll")) for e in EPSILONS)


def views_gain(r: Results, method: str) -> str:
    """Accuracy with ten views less that with one view of the same runs."""
    return over_epsilons(
        lambda e: signed(
            100
            * (r.score(method, e, ("tta", *CHARGED), "accuracy") - r.score(method, e, ("mean", *CHARGED), "accuracy")),
            2,
        )
    )


def lead(r: Results, method: str) -> str:
    """Accuracy of the recipe less that of a baseline, both with ten views."""
    return over_epsilons(lambda e: told(prediction_difference(r, e, "tta", method, "accuracy"), 2, 100.0))


def prediction_cells(r: Results, method: str, way: tuple[str, str, str, str]) -> list[str]:
    digits = {"accuracy": (100.0, 2), "nll": (1.0, 4), "ece": (1.0, 3)}
    return [number(f * r.score(method, e, way, c), d) for c, (f, d) in digits.items() for e in EPSILONS]


#: Files beside this one, and their blocks.
FILES: dict[str, dict[str, Callable[[Results], str]]] = {
    "README.md": {
        block.__name__: block for block in (found, bars, test, paired, posterior, calibration, choices.caveats)
    }
    | {"digits": lambda _: judged(), "worth": lambda _: worth()},
    "choices.md": {block.__name__: block for block in (choices.starts, choices.tuning, choices.parts)}
    | {"digits": lambda _: rates()},
}


def filled(name: str, text: str, results: Results) -> str:
    """The text of a file with every block made anew."""
    for block, make in FILES[name].items():
        pattern = re.compile(rf"(<!-- begin {block} -->\n).*?(<!-- end {block} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise SystemExit(
                f"{name}: needs '<!-- begin {block} -->' and '<!-- end {block} -->' once. Add the markers."
            )
        begin, end = pattern.findall(text)[0]
        before, after = pattern.split(text)[0], pattern.split(text)[-1]
        text = f"{before}{begin}{make(results)}\n{end}{after}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="the folder of the tables")
    parser.add_argument("--pages", type=Path, default=HERE, help="the folder of README.md and choices.md")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page would change")
    a = parser.parse_args()
    results = Results.read(a.results)
    for name in FILES:
        text = (a.pages / name).read_text()
        made = filled(name, text, results)
        if a.check and made != text:
            raise SystemExit(f"{a.pages / name}: is not what {a.results} gives. Run this command without --check.")
        if not a.check:
            (a.pages / name).write_text(made)
    if not a.check:
        draw(results, a.pages / "results" / "scores")


if __name__ == "__main__":
    main()
