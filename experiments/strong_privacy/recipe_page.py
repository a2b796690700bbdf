"""Tables and figure of the recipe on CPU: ``recipe.md`` and ``recipe.png``."""

from __future__ import annotations

import json
import math
from statistics import fmean, stdev

from dpivon.recipe import WORTH, blur
from experiments.strong_privacy.recipe import ABLATED, BOUND, COMPARED, DEFAULT, EPSILONS, RATE, WAYS, chosen, score


def cell(rows, kind, key):
    values = [score(r, "test", kind, key) for r in rows]
    return f"{fmean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def paired(rows, others, kind, key):
    """Mean difference over seeds and its standard error."""
    gaps = [
        score(a, "test", kind, key) - score(b, "test", kind, key)
        for a in rows
        for b in others
        if a["seed"] == b["seed"]
    ]
    return fmean(gaps), stdev(gaps) / math.sqrt(len(gaps))


def default_rows(rows, epsilon):
    return [r for r in rows if r["method"] == "DP-Steady" and r["epsilon"] == epsilon and r["lr"] == RATE]


def sections(name, result):
    rows, task = result["runs"], result["task"]
    d, h = task["network"]
    lines = [
        f"## {name}: MLP {d}–{h}–10, {task['n']:,} examples, b = {task['batch']}, {task['epochs']} epochs, C = {BOUND:g}, "
        f"δ = {task['delta']:g}",
        "",
        f"{result['seeds']} seeds, mean ± standard deviation, test data · {result['seconds']:.0f} s · {result['machine']}, "
        f"torch {result['torch']}",
    ]
    header = "| method | " + " | ".join(f"ε = {e:g}" for e in EPSILONS) + " |"
    rule = "|---" * (1 + len(EPSILONS)) + "|"
    for kind, key, title in (
        ("tempered", "accuracy", "Accuracy, at the rate chosen by NLL after the temperature, which does not change it"),
        ("raw", "nll", "NLL, raw"),
        ("tempered", "nll", "NLL after the private temperature"),
        ("raw", "ece", "ECE, raw"),
        ("tempered", "ece", "ECE after the private temperature"),
    ):
        lines += ["", f"**{title}.**", "", header, rule]
        for label in COMPARED:
            cells = [cell(chosen(rows, label, e, kind)[0], kind, key) for e in EPSILONS]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        cells = [cell(default_rows(rows, e), kind, key) for e in EPSILONS]
        lines.append(f"| {DEFAULT} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"**{DEFAULT}, less each baseline at its best rate, NLL after the temperature** (± standard error).",
        "",
        header,
        rule,
    ]
    for label in COMPARED:
        cells = []
        for e in EPSILONS:
            gap, error = paired(default_rows(rows, e), chosen(rows, label, e, "tempered")[0], "tempered", "nll")
            cells.append(f"{gap:+.3f} ± {error:.3f}")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    rates = "; ".join(
        f"{label} " + " / ".join(f"{chosen(rows, label, e, 'tempered')[1]:g}" for e in EPSILONS) for label in COMPARED
    )
    found = " / ".join(f"{fmean(r['temperature'] for r in default_rows(rows, e)):.2f}" for e in EPSILONS)
    cost = " / ".join(f"{default_rows(rows, e)[0]['epsilon_training']:.3f}" for e in EPSILONS)
    blurs = " / ".join(f"{blur(result['facts'][f'{e:g}']['temperature_noise'], task['n']):.3f}" for e in EPSILONS)
    lines += [
        "",
        f"Rates chosen: {rates}. Temperatures of the recipe: {found}, chosen with a blur of {blurs} nats (`dpivon.steady` "
        f"leaves the temperature out above {WORTH:g}). ε of training alone: {cost}.",
    ]
    lines += [
        "",
        f"**The recipe without one of its parts** (r = {RATE:g}; NLL after the temperature, or as said).",
        "",
        header,
        rule,
    ]
    whole = [default_rows(rows, e) for e in EPSILONS]
    for label, kind in (
        ("the whole", "tempered"),
        ("without the temperature", "raw"),
        ("and without width", "mean"),
        ("and without averaging", "last iterate"),
    ):
        lines.append(f"| {label} | " + " | ".join(cell(r, kind, "nll") for r in whole) + " |")
    for label in ABLATED:
        mine = [[r for r in rows if r["method"] == label and r["epsilon"] == e] for e in EPSILONS]
        if not all(mine):
            continue
        lines.append(f"| {label} | " + " | ".join(cell(r, "tempered", "nll") for r in mine) + " |")
    for r in (RATE / 2, 2 * RATE):
        lines.append(f"| r = {r:g} | " + " | ".join(_rate(rows, e, r) for e in EPSILONS) + " |")
    for label in ("DP-SGD", "DP-Adam"):
        single = _single(rows, label)
        cells = [
            cell(
                [r for r in rows if r["method"] == label and r["epsilon"] == e and r["lr"] == single], "tempered", "nll"
            )
            for e in EPSILONS
        ]
        lines.append(f"| {label} at one rate for all ε, {single:g} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _rate(rows, epsilon, lr):
    return cell(
        [r for r in rows if r["method"] == "DP-Steady" and r["epsilon"] == epsilon and r["lr"] == lr], "tempered", "nll"
    )


def _single(rows, label):
    mine = [r for r in rows if r["method"] == label]
    return min(
        {r["lr"] for r in mine},
        key=lambda lr: fmean(score(r, "validation", "tempered", "nll") for r in mine if r["lr"] == lr),
    )


def report(out):
    lines = [
        "# The recipe for strong privacy, on CPU",
        "",
        "`python -m experiments.strong_privacy.recipe digits`, `… fashion`, `… temperature`, `… report`. How it is done stands "
        "at the head of `experiments/strong_privacy/recipe.py`. Every ε is the whole: training and the temperature.",
        "",
    ]
    results = {}
    for name in ("digits", "fashion"):
        if (out / f"{name}.json").exists():
            results[name] = json.loads((out / f"{name}.json").read_text())
            lines += sections(name, results[name])
    if (out / "temperature.json").exists():
        found = json.loads((out / "temperature.json").read_text())
        lines += [
            "## Three ways to choose a temperature at the same cost",
            "",
            f"Excess NLL over the best temperature, mean of {found['repeats']} choices (3 at n = 50,000); ten classes, "
            "predictions 2.5 times too sure; ε of the choice alone at δ = 1e-5.",
            "",
            "| n | ε | T left at 1 | " + " | ".join(WAYS) + " |",
            "|---" * (3 + len(WAYS)) + "|",
        ]
        for r in found["rows"]:
            cells = " | ".join(f"{r[w]:.4f}" for w in WAYS)
            lines.append(f"| {r['n']:,} | {r['epsilon']:g} | {r['raw']:.3f} | {cells} |")
    (out / "recipe.md").write_text("\n".join(lines) + "\n")
    figure(results, out / "recipe.png")
    return [out / "recipe.md", out / "recipe.png"]


def figure(results, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    panels = (
        ("tempered", "accuracy", "accuracy"),
        ("raw", "nll", "NLL, raw"),
        ("tempered", "nll", "NLL, private temperature"),
    )
    fig, axes = plt.subplots(len(results), 3, figsize=(13, 4 * len(results)), constrained_layout=True, squeeze=False)
    for line, (name, result) in zip(axes, results.items(), strict=True):
        rows = result["runs"]
        for axis, (kind, key, title) in zip(line, panels, strict=True):
            for i, label in enumerate([*COMPARED, DEFAULT]):
                if label == "DP-Steady":
                    continue
                found = [
                    default_rows(rows, e) if label == DEFAULT else chosen(rows, label, e, kind)[0] for e in EPSILONS
                ]
                values = [[score(r, "test", kind, key) for r in f] for f in found]
                places = [e * 1.04 ** (i - 2) for e in EPSILONS]
                style = {"lw": 2.4, "color": "black"} if label == DEFAULT else {"lw": 1.4}
                shown = label if label == DEFAULT else f"{label}, best rate"
                axis.errorbar(
                    places,
                    [fmean(v) for v in values],
                    [stdev(v) for v in values],
                    fmt="o-",
                    ms=4,
                    capsize=2,
                    label=shown,
                    **style,
                )
            axis.set_xscale("log")
            axis.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
            axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
            axis.set_xlabel(f"ε in all (δ = {result['task']['delta']:g})")
            axis.set_title(f"{name}: {title}", fontsize=10)
            axis.grid(alpha=0.3)
        line[0].legend(fontsize=8)
    fig.savefig(path, dpi=110)
