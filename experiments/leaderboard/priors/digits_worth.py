"""What is each part of a prior worth on the digits? One part at a time, with the training of ``digits.py``.

python -m experiments.leaderboard.priors.digits_worth choose                        # s, the precision's share
python -m experiments.leaderboard.priors.digits_worth judge filters.safetensors     # all arms with fresh seeds

Runs that results/digits-worth.csv has already are not made again. A run takes about four seconds on one core.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

import dpivon
from dpivon import demo
from dpivon.data.images import load_digits
from dpivon.machine import hardware_name, one_thread
from dpivon.metrics import accuracy, nll
from dpivon.models import SmallCNN
from dpivon.priors import start_from
from dpivon.priors.start import last_layer
from dpivon.recipe import AFTER_HEAD
from experiments.leaderboard.priors import digits, tables
from experiments.leaderboard.priors.arms import number, paired_interval, table, told

TABLE = Path(__file__).parent / "results" / "digits-worth.csv"
EPSILONS, SHARES = (0.5, 1.0, 2.0), (1.0, 0.3, 0.1, 0.03)
CHOOSING, JUDGING = (20, 21, 22), tuple(range(30, 40))
#: An arm, and the arms that it is compared with: they differ in one part.
ARMS = {
    "scratch": (),
    "mean": ("scratch",),
    "mean and precision": ("mean",),
    f"head first, r = {AFTER_HEAD:g}": ("mean",),
    f"head first, r = {demo.PRIOR_LR:g}": ("mean",),
    "filters": ("mean", "scratch"),
}
COLUMNS = ("arm", "epsilon", "rate", "share", "seed", "epochs", "noise_multiplier", "accuracy", "nll")
COLUMNS += ("device", "torch", "commit")


def around(prior: dpivon.Posterior, share: float) -> dpivon.Posterior:
    """The prior with s² times its variance, but for the last layer, which stays as wide as an initialisation."""
    last = f"{last_layer(SmallCNN())}."
    return dpivon.Posterior(
        prior.mean, {name: v if name.startswith(last) else share**2 * v for name, v in prior.variance.items()}
    )


def row(arm: str, epsilon: float, seed: int, share: float | str = "", file: str = "") -> dict[str, Any]:
    """Scores of one run at its mean, on the validation digits. ``share`` is s, of the precision alone."""
    data, start = load_digits(), {"scratch": "", "filters": file}.get(arm, demo.PRIOR)
    rate = digits.chosen(arm, 1.0) if arm == "filters" else digits.chosen(start or "scratch", epsilon)
    rate = float(arm.split()[-1]) if arm.startswith("head first") else rate
    x, y = data.train.x, data.train.y
    given: dict[str, Any] = {"target_epsilon": epsilon, "delta": demo.DELTA, "epochs": digits.EPOCHS, "seed": seed}
    given |= {"batch_size": demo.BATCH_SIZE, "accountant": "rdp", "lr": rate, "progress": False}
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(demo.stream(seed, "weights").initial_seed())
        network = SmallCNN()
        prior = start_from(network, start, input_mean=0.0, input_std=1.0) if start else None
        if arm.startswith("head first"):
            trained = dpivon.steady(network, x, y, start_from=prior, **given)
            assert trained.temperature == 1.0, "a temperature has a part of the budget"
            fitted: Any = trained.predictor
        else:
            pull = around(prior, float(share)) if prior and share else None
            fitted = dpivon.fit(network, x, y, prior=pull, **given)
        probs = fitted.predict(data.validation.x, 0).probs
        found = {"accuracy": accuracy(probs, data.validation.y), "nll": nll(probs, data.validation.y)}
        own = {"arm": arm, "epsilon": epsilon, "rate": rate, "share": share, "seed": seed, "epochs": digits.EPOCHS}
        own |= {name: round(value, 4) for name, value in found.items()}
        own["noise_multiplier"] = round(fitted.budget.noise_multiplier, 4)
        return own | tables.facts(x.device) | {"device": hardware_name(x.device)}


def at(arm: str, epsilon: float, seeds: Sequence[int], share: float | str = "") -> list[tables.Row]:
    """The committed runs, ordered by seed; of the precision, those with this share."""
    rows = [r for r in tables.read(TABLE) if (r["arm"], float(r["epsilon"]), r["share"]) == (arm, epsilon, str(share))]
    return sorted((r for r in rows if int(r["seed"]) in seeds), key=lambda r: int(r["seed"]))


def tried(epsilon: float) -> dict[float, float]:
    """Mean NLL by share, over the seeds that choose."""
    return {s: fmean(digits.values(at("mean and precision", epsilon, CHOOSING, s), "nll")) for s in SHARES}


def chosen(epsilon: float) -> float:
    """The share with the lowest mean NLL."""
    found = tried(epsilon)
    return min(found, key=found.__getitem__)


def judged(arm: str, epsilon: float) -> list[tables.Row]:
    return at(arm, epsilon, JUDGING, chosen(epsilon) if arm == "mean and precision" else "")


def worth() -> str:
    """Every arm with the fresh seeds, and its differences."""
    head = ("ε", "arm", "r", "s", "accuracy", "NLL", "less", "points", "NLL, difference")
    lines = []
    for epsilon in EPSILONS:
        for arm, others in ARMS.items():
            runs = judged(arm, epsilon)
            scores = [(digits.values(runs, name), d, f) for name, d, f in (("accuracy", 1, 100.0), ("nll", 3, 1.0))]
            shown = [f"{number(f * fmean(v), d)} ± {number(f * stdev(v), d)}" for v, d, f in scores]
            used = f"{float(runs[0]['rate']):g}", runs[0]["share"] and f"{float(runs[0]['share']):g}"
            own = (f"{epsilon:g}", arm.split(",")[0], *used, *shown)
            for other in others or ("",):
                pairs = [(name, d, f) for name, d, f in (("accuracy", 1, 100.0), ("nll", 3, 1.0)) if other]
                b = judged(other, epsilon) if other else []
                found = [told(paired_interval(runs, b, n, f"{arm} at ε={epsilon}"), d, f) for n, d, f in pairs]
                lines.append((*own, other, *(found or ("", ""))))
    shares = " / ".join(f"{s:g}" for s in SHARES)
    by_share = "; ".join(f"{' / '.join(number(v, 3) for v in tried(e).values())} at ε = {e:g}" for e in EPSILONS)
    return f"{table(head, lines)}\n\nNLL by which s was chosen, at s = {shares}: {by_share}."


def planned(plan: str, file: str) -> Iterator[tuple[str, float, int, float | str, str]]:
    """What ``row`` is called with, seed by seed, so that a part of the plan has all arms."""
    for seed in CHOOSING if plan == "choose" else JUDGING:
        for epsilon in EPSILONS:
            if plan == "choose":
                yield from (("mean and precision", epsilon, seed, share, "") for share in SHARES)
                continue
            for arm in ARMS if file else [arm for arm in ARMS if arm != "filters"]:
                yield arm, epsilon, seed, chosen(epsilon) if arm == "mean and precision" else "", file


def main() -> None:
    plan, file = sys.argv[1], "".join(sys.argv[2:])
    for arm, epsilon, seed, share, prior in planned(plan, file):
        if not at(arm, epsilon, (seed,), share):
            tables.append(TABLE, [row(arm, epsilon, seed, share, prior)], COLUMNS)


if __name__ == "__main__":
    main()
