"""Blocks of the README and of choices.md that say what was tried and chosen on validation images."""

from __future__ import annotations

import math
from statistics import mean

from experiments.leaderboard.priors.arms import BASELINES, RECIPE, Results, number, signed, table, wrapped
from experiments.leaderboard.priors.plans import (
    EPSILONS,
    SCRATCH,
    SETTING,
    Cell,
    Row,
    best_default,
    best_rate,
    validated,
)

#: Validation images.
SCORED = 5000


def starts(r: Results) -> str:
    probes = {row["prior"]: row for row in r.probe}
    steps = {row["prior"]: int(row["steps"]) for row in r.learning}
    every = [row for row in r.round("final") if row["plan"] == "starts"]
    rows = []
    for name in dict.fromkeys(row["start"] for row in every):
        own = {float(row["epsilon"]): row for row in every if row["start"] == name}
        probe = [f"{100 * float(probes[name][column]):.1f}" for column in ("hidden_accuracy", "maps_accuracy")]
        cells = [number(100 * float(own[e]["accuracy"]), 1) for e in EPSILONS]
        middle = number(100 * mean(float(row["accuracy"]) for row in own.values()), 2)
        nll = [number(float(own[e]["tempered_nll"]), 3) for e in EPSILONS]
        rows.append([f"`{name}`", f"{steps[name.removesuffix('-spread')]:,}", *probe, *cells, middle, *nll])
    rows.sort(key=lambda row: -float(row[7]))
    heads = ["steps", "probe, hidden", "probe, maps", *(f"ε = {e:g}" for e in EPSILONS), "mean"]
    return table(["prior", *heads, *(f"NLL, {e:g}" for e in EPSILONS)], rows)


def tuning(r: Results) -> str:
    rows_, rows = r.round("final"), []
    base = best_default(rows_, r.prior)
    fixed = {n: str(getattr(base, n)) for n in SETTING if n not in ("method", "lr", "features")}
    for features in ("1.0", "0.5", "0.25"):
        tried = validated(rows_, **fixed, features=features, method=RECIPE, seed="0")
        scores = {lr: mean(float(row["accuracy"]) for row in tried if row["lr"] == lr) for lr in rates_of(tried)}
        rows.append([f"recipe, features {features}", "mean", grid(scores)])
    for method, title in BASELINES.items():
        for e in EPSILONS:
            tried = baseline_rows(rows_, base, method, e)
            rows.append([title, f"{e:g}", grid({row["lr"]: float(row["accuracy"]) for row in tried})])
    return table(["method", "ε", "rate: validation accuracy in %, best in bold"], rows)


def baseline_rows(rows: list[Row], base: Cell, method: str, epsilon: float) -> list[Row]:
    fixed = {n: str(getattr(base, n)) for n in SETTING if n not in ("method", "lr")}
    return validated(rows, **fixed, method=method, epsilon=str(epsilon))


def rates_of(rows: list[Row]) -> list[str]:
    return sorted({row["lr"] for row in rows}, key=float)


def grid(scores: dict[str, float]) -> str:
    best = max(scores, key=scores.__getitem__)
    cells = {lr: f"{lr}: {100 * scores[lr]:.1f}" for lr in sorted(scores, key=float)}
    return ", ".join(f"**{cell}**" if lr == best else cell for lr, cell in cells.items())


def parts(r: Results) -> str:
    """The recipe on validation images with one change at a time, from scratch, and with several changes (joint)."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in validated(r.round("judge"), method=RECIPE):
        groups.setdefault(tuple(row[name] for name in SETTING), []).append(row)
    plain = tuple(r.arm("plain", EPSILONS[0])[0][name] for name in SETTING)
    base = mean(float(row["accuracy"]) for row in groups[plain])
    rows = []
    for setting, same in sorted(groups.items(), key=lambda item: item[0] != plain):
        changed = {n: v for n, v, p in zip(SETTING, setting, plain, strict=True) if v != p}
        if len(changed) > 1 and same[0]["plan"] not in ("longer", "joint") and same[0]["start"] != SCRATCH:
            continue
        by_epsilon = {float(row["epsilon"]): row for row in same}
        scores = [float(by_epsilon[e]["accuracy"]) for e in EPSILONS]
        cells = [number(100 * v, 1) for v in scores]
        cells += [number(float(by_epsilon[e]["tempered_nll"]), 3) for e in EPSILONS]
        rows.append(
            [setting_words(changed) or "nothing", *cells, signed(100 * (mean(scores) - base), 2) if changed else ""]
        )
    heads = [f"ε = {e:g}" for e in EPSILONS] + [f"NLL, {e:g}" for e in EPSILONS]
    return table(["changed", *heads, "mean gain"], rows)


def setting_words(changed: dict[str, str]) -> str:
    words = {"lr": "r", "head_steps": "head steps", "start": "from"}
    return ", ".join(f"{words.get(name, name)} {value}" for name, value in changed.items())


def caveats(r: Results) -> str:
    """The caveats that have numbers."""
    second = r.round("final")
    base = best_default(second, r.prior)
    tried = {
        plan: {tuple(row[n] for n in SETTING) for row in validated(r.round(plan), start=r.prior, method=RECIPE)}
        for plan in ("judge", "final")
    }
    counts, ends = [], []
    for method, title in BASELINES.items():
        numbers = []
        for e in EPSILONS:
            rates = rates_of(baseline_rows(second, base, method, e))
            numbers.append(str(len(rates)))
            if str(best_rate(second, r.prior, method, e, base)) in (rates[0], rates[-1]):
                ends.append(f"{title} at ε = {e:g}")
        counts.append(f"{title} {' / '.join(numbers)} rates")
    p = mean(float(row["accuracy"]) for row in validated(second, plan="starts"))
    error = 100 * math.sqrt(p * (1 - p) / SCORED)
    items = [
        f"**Search effort.** From `{r.prior}` the recipe had {len(tried['final'])} settings with head first, after "
        f"{len(tried['judge'])} in an earlier round that suggested head first and `features`; {' and '.join(counts)} per ε, "
        "in the recipe's setting. The baselines' rates are chosen at each ε, the recipe's once for all. Best rates of "
        f"baselines at an end of their grid: {', '.join(ends) or 'none'}.",
        f"**Noise.** Choices rest on one seed and {SCORED:,} images: one accuracy has a standard error of {error:.1f} "
        "points. On the test set three seeds leave differences below about a point unresolved.",
    ]
    return "\n".join(wrapped(item, "- ") for item in items)
