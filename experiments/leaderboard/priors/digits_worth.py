"""What is each part of a prior worth on the digits? One part at a time, with the training of ``digits.py``.

python -m experiments.leaderboard.priors.digits_worth choose                        # s, the precision's share
python -m experiments.leaderboard.priors.digits_worth judge FILE AGAIN              # all arms with fresh seeds

Runs that results/digits-worth.csv has already are not made again. A run takes about four seconds on one core. The files are of
``dpivon prior learn --network small --side 8 --channels 1 --process filters --steps 10000 --seconds 1000 --batch 256
--pool 65536 --out FILE``: that of ``digits.py``, and one that the command made again, whose weights are others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

import dpivon
from dpivon import demo
from dpivon.data.images import load_digits
from dpivon.machine import hardware_name, one_thread
from dpivon.metrics import accuracy, nll
from dpivon.models import SmallCNN
from dpivon.optim.curvature import matrix
from dpivon.optim.steady import Steady, weight_scale
from dpivon.priors import start_from
from experiments.leaderboard.priors import digits, tables
from experiments.leaderboard.priors.arms import number, paired_interval, table, told, wrapped

TABLE = Path(__file__).parent / "results" / "digits-worth.csv"
EPSILONS, SHARES = (0.5, 1.0, 2.0), (1.0, 0.3, 0.1, 0.03)
CHOOSING, JUDGING = (20, 21, 22), tuple(range(30, 40))
#: The last layer of the demo's network.
LAST = "head.logits."
#: r of all weights from a prior, and r in units of an initialisation for the arm 'by default', once the recipe's.
ALL_WEIGHTS, AFTER_HEAD = 0.45, 2.25
#: An arm, and the arms that it is compared with: they differ in one part.
ARMS = {
    "scratch": (),
    "mean": ("scratch",),
    "mean and precision": ("mean",),
    "mean and precision, last layer free": ("mean",),
    "head first, r = 1.25": ("mean",),
    f"head first, r = {ALL_WEIGHTS:g}": ("mean",),
    "head first, by default": ("mean", "scratch"),
    "filters": ("mean", "scratch"),
    "filters, again": ("mean", "scratch", "filters"),
}
COLUMNS = ("arm", "epsilon", "rate", "share", "seed", "epochs", "noise_multiplier", "accuracy", "nll")
COLUMNS += ("device", "torch", "commit")


def around(prior: dpivon.Posterior, share: float, free: bool) -> dpivon.Posterior:
    """The prior with s² times its variance, but for the last layer.

    That is as wide as an initialisation, or with ``free`` as wide as the usual weight decay makes it in all other arms.
    """
    decay = Steady.defaults["weight_decay"]
    drawn = 1 / (3 * SmallCNN().head.logits.in_features)
    wide = {n: torch.full_like(v, 1 / (decay * demo.TRAIN) if free else drawn) for n, v in prior.variance.items()}
    own = {n: wide[n] if n.startswith(LAST) else share**2 * v for n, v in prior.variance.items()}
    return dpivon.Posterior(prior.mean, own)


def head_first(network: SmallCNN, x: Tensor, y: Tensor, learned: bool, given: dict[str, Any]) -> dpivon.Fitted:
    """The last layer alone for a twelfth of the epochs, then all weights, with one σ."""
    epochs, rate = given["epochs"], given["lr"]
    target = {name: given[name] for name in ("target_epsilon", "delta", "batch_size", "accountant")}
    sigma = dpivon.budget(dataset_size=len(y), epochs=epochs, **target).noise_multiplier
    common = {name: given[name] for name in ("delta", "batch_size", "accountant", "seed", "progress")}
    common["noise_multiplier"] = sigma
    body = [p for n, p in network.named_parameters() if not n.startswith(LAST)]
    drawn = [p.detach() if learned else torch.zeros_like(p) for p in body]
    unit = {"trace": 1.0, "scale": weight_scale(drawn, [matrix(p.shape) for p in drawn])}
    for p in body:
        p.requires_grad_(False)
    first = -(-epochs // 12)
    head = dpivon.fit(network, x, y, epochs=first, **common)
    rest = {"epochs": epochs - first, "lr": rate, "options": unit, "after": head}
    return dpivon.fit(head.model.requires_grad_(), x, y, **common, **rest)


def row(arm: str, epsilon: float, seed: int, share: float | str = "", file: str = "") -> dict[str, Any]:
    """Scores of one run at its mean, on the validation digits. ``share`` is s, of the precision alone."""
    data, start = load_digits(), "" if arm == "scratch" else file or demo.PRIOR
    rate = digits.chosen("filters", 1.0) if file else digits.chosen(start or "scratch", epsilon)
    head, default = arm.startswith("head first"), arm.endswith("by default")
    rate = AFTER_HEAD if default else float(arm.split()[-1]) if head else rate
    x, y = data.train.x, data.train.y
    given: dict[str, Any] = {"target_epsilon": epsilon, "delta": demo.DELTA, "epochs": digits.EPOCHS, "seed": seed}
    given |= {"batch_size": demo.BATCH_SIZE, "accountant": "rdp", "lr": rate, "progress": False}
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(demo.stream(seed, "weights").initial_seed())
        network = SmallCNN()
        prior = start_from(network, start, input_mean=0.0, input_std=1.0) if start else None
        if head:
            # By default in units of an initialisation; else of the prior's weights, as all other arms.
            fitted: Any = head_first(network, x, y, not default, given)
        else:
            pull = around(prior, float(share), arm.endswith("free")) if prior and share else None
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


def tried(arm: str, epsilon: float) -> dict[float, float]:
    """Mean NLL by share, over the seeds that choose."""
    return {s: fmean(digits.values(at(arm, epsilon, CHOOSING, s), "nll")) for s in SHARES}


def chosen(arm: str, epsilon: float) -> float | str:
    """The share with the lowest mean NLL; of an arm without a precision, none."""
    if "precision" not in arm:
        return ""
    found = tried(arm, epsilon)
    return min(found, key=found.__getitem__)


def judged(arm: str, epsilon: float) -> list[tables.Row]:
    return at(arm, epsilon, JUDGING, chosen(arm, epsilon))


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
            own = (f"{epsilon:g}", arm.split(", r")[0], *used, *shown)
            for other in others or ("",):
                pairs = [(name, d, f) for name, d, f in (("accuracy", 1, 100.0), ("nll", 3, 1.0)) if other]
                b = judged(other, epsilon) if other else []
                found = [told(paired_interval(runs, b, n, f"{arm} at ε={epsilon}"), d, f) for n, d, f in pairs]
                lines.append((*own, other, *(found or ("", ""))))
    shares = " / ".join(f"{s:g}" for s in SHARES)
    choices = [
        f"{' / '.join(number(v, 3) for v in tried(arm, e).values())} ({arm}, ε = {e:g})"
        for arm in ARMS
        if "precision" in arm
        for e in EPSILONS
    ]
    about = f"NLL by which s was chosen, three seeds, at s = {shares}: {'; '.join(choices)}."
    return f"{table(head, lines)}\n\n{wrapped(about)}"


def planned(plan: str, files: Sequence[str]) -> Iterator[tuple[str, float, int, float | str, str]]:
    """What ``row`` is called with, seed by seed, so that a part of the plan has all arms."""
    learned = dict(zip((arm for arm in ARMS if arm.startswith("filters")), files, strict=False))
    for seed in CHOOSING if plan == "choose" else JUDGING:
        for epsilon in EPSILONS:
            if plan == "choose":
                pulled = [arm for arm in ARMS if "precision" in arm]
                yield from ((arm, epsilon, seed, share, "") for arm in pulled for share in SHARES)
                continue
            for arm in ARMS:
                if arm in learned or not arm.startswith("filters"):
                    yield arm, epsilon, seed, chosen(arm, epsilon), learned.get(arm, "")


def main() -> None:
    for arm, epsilon, seed, share, file in planned(sys.argv[1], sys.argv[2:]):
        if not at(arm, epsilon, (seed,), share):
            tables.append(TABLE, [row(arm, epsilon, seed, share, file)], COLUMNS)


if __name__ == "__main__":
    main()
