"""Head arms: the logits alone, trained privately on features that stay as the prior has them.

    python -m experiments.leaderboard.wide.heads --data DATA --prior wide.npz --table heads.csv [--judge]

Features are the mean over ten shifted and mirrored copies of an image, computed once, so that a step is nearly free: every step
takes all images (q = 1), for which the cost of T steps at σ is that of one at σ/√T. A method with ``flat-`` before its name
learns in the coordinates of :mod:`dpivon.priors.features`. All arms are compared on validation images; arms that
the table has are not trained again.
With ``--judge`` the best arm per ε is trained on all training images with three seeds, and scored on the test set.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.metrics import accuracy, ece, nll
from dpivon.optim.average import window_decay
from dpivon.priors.features import flat, made_up
from dpivon.privacy.accounting import epsilon, noise_multiplier
from dpivon.stacked import AnyNetwork, Run, Stack
from dpivon.temperature import temper
from experiments.leaderboard.priors import tables
from experiments.leaderboard.priors.data import load_split
from experiments.leaderboard.priors.predictions import RESERVE
from experiments.leaderboard.priors.private import DELTA, C
from experiments.leaderboard.priors.scores import best_temperature
from experiments.leaderboard.wide.network import WideNetwork, features, load_wide, process_of

EPSILONS = (1.0, 3.0, 8.0)
RATES = {"dp-sgd": (3.0, 10.0, 30.0, 100.0), "dp-adam": (0.03, 0.1, 0.3), "dp-steady": (8.0, 16.0, 32.0)}
FLAT = "flat-"
STEPS = (160, 500)
ACCOUNTANT = "pld"
Row = dict[str, str]


@dataclass(frozen=True)
class Arm:
    """One way to train the logits."""

    epsilon: float
    method: str = "dp-sgd"
    lr: float = 10.0
    steps: int = 160
    seed: int = 0

    def run(self, what: str, sigma: float, size: int) -> Run:
        seed = int(hashlib.sha256(f"head {self} {what} {sigma}".encode()).hexdigest()[:15], 16)
        method = self.method.removeprefix(FLAT)
        averaged = {} if method == "dp-steady" else {"ema": window_decay(float(self.steps))}
        return Run(method, seed, sigma, C, self.lr, size, averaged)

    def cost(self, sigma: float) -> tuple[float, float, int]:
        return sigma, 1.0, self.steps


NAMES = tuple(field.name for field in fields(Arm))
COLUMNS = (
    *("prior", "places", "split", *NAMES, "delta", "max_grad_norm", "noise_multiplier", "epsilon_spent", "train_size"),
    *("accuracy", "nll", "ece", "temperature", "tempered_nll", "tempered_ece", "device", "torch", "commit"),
    "accountant",
)


def trained_heads(
    runs: Sequence[Run], steps: int, x: Tensor, y: Tensor, coordinates: tuple[Tensor, Tensor] | None = None
) -> list[nn.Linear]:
    """Averaged logits of every run, from zero; learned in flat coordinates if these are given, and of features as they are."""
    if coordinates is not None:
        x = (x - coordinates[0]) @ coordinates[1]
    network = AnyNetwork(lambda: nn.Linear(x.shape[1], 10))
    stack = Stack(runs, network, x, y, start=torch.zeros(len(runs), network.size), steps=steps, block=8)
    for _ in stack.train(steps):
        pass
    found = [stack.model(i, averaged=True) for i in range(len(runs))]
    heads = [head for head in found if isinstance(head, nn.Linear)]
    for head in heads if coordinates is not None else ():
        mean, matrix = coordinates
        head.weight.data = head.weight.data @ matrix.T
        head.bias.data -= head.weight.data @ mean
    return heads


def flattened(network: WideNetwork, path: Path, device: torch.device, toy: bool) -> tuple[Tensor, Tensor]:
    """Flat coordinates of a prior's features, by images of its process."""
    return flat(features(network, made_up(process_of(path), 32, count=512 if toy else None).to(device)))


def best_arm(rows: Sequence[Row], prior: str, places: int, target: float) -> Arm:
    """The arm with the best validation accuracy from this prior at this ε; the default where none was tried."""
    wanted = prior, places, "validation", target
    found = [r for r in rows if (r["prior"], int(r["places"]), r["split"], float(r["epsilon"])) == wanted]
    if not found:
        return Arm(target)
    row = max(found, key=lambda r: float(r["accuracy"]))
    return Arm(target, row["method"], float(row["lr"]), int(row["steps"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prior", type=Path, required=True)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--places", type=int, default=1, help="of the features, in each direction: 1, 2, 4 or 8")
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS), help="T of the arms that are tried")
    every = [f"{m}:{lr:g}" for m, rates in RATES.items() for lr in rates]
    parser.add_argument("--arms", nargs="+", default=every, metavar="METHOD:RATE", help="to try")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--toy", action="store_true")
    a = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    split = load_split(a.data, device, judge=a.judge, toy=a.toy)
    began, network = time.monotonic(), load_wide(a.prior, a.toy, a.places).to(device)
    x, fit, held = (features(network, i, views=True) for i in (split.images, split.fit_images, split.score_images))
    print(f"features {tuple(x.shape)}, rms {float(x.square().mean().sqrt()):.3f}, {time.monotonic() - began:.1f} s")
    known = tables.read(a.table)
    if a.judge:
        arms = [replace(best_arm(known, a.prior.stem, a.places, e), seed=seed) for e in EPSILONS for seed in (1, 2, 3)]
    else:
        tried = [word.split(":") for word in a.arms]
        arms = [Arm(e, m, float(lr), t) for t in a.steps for e in EPSILONS for m, lr in tried]
    done = {(r["prior"], r["places"], r["split"], *(r[n] for n in NAMES)) for r in known}
    arms = [
        arm
        for arm in arms
        if (a.prior.stem, str(a.places), split.name, *(str(v) for v in asdict(arm).values())) not in done
    ]
    for steps, is_flat in sorted({(arm.steps, arm.method.startswith(FLAT)) for arm in arms}):
        alike = [arm for arm in arms if (arm.steps, arm.method.startswith(FLAT)) == (steps, is_flat)]
        mine = [replace(arm, steps=4) if a.toy else arm for arm in alike]
        steps, to = mine[0].steps, flattened(network, a.prior, device, a.toy) if is_flat else None
        sigmas = {
            e: noise_multiplier(e, DELTA, 1.0, steps, ACCOUNTANT, also=[RESERVE]) for e in {arm.epsilon for arm in mine}
        }
        runs = [arm.run(split.name, sigmas[arm.epsilon], len(x)) for arm in mine]
        rows: list[dict[str, Any]] = []
        began = time.monotonic()
        for arm, head in zip(mine, trained_heads(runs, steps, x, split.labels, to), strict=True):
            with torch.no_grad():
                probs, fitted = (head(f).softmax(1) for f in (held, fit))
            t, y, sigma = best_temperature(fitted, split.fit_labels), split.score_labels, sigmas[arm.epsilon]
            scored = {"accuracy": accuracy(probs, y), "nll": nll(probs, y), "ece": ece(probs, y), "temperature": t}
            scored |= {"tempered_nll": nll(temper(probs, t), y), "tempered_ece": ece(temper(probs, t), y)}
            own = {
                "prior": a.prior.stem,
                "places": a.places,
                "split": split.name,
                "delta": DELTA,
                "max_grad_norm": C,
                "train_size": len(x),
            }
            own |= {"noise_multiplier": round(sigma, 4)} | asdict(arm) | tables.facts(device)
            own |= {
                "epsilon_spent": round(epsilon([arm.cost(sigma), RESERVE], DELTA, ACCOUNTANT), 4),
                "accountant": ACCOUNTANT,
            }
            rows.append(own | {name: round(value, 5) for name, value in scored.items()})
            print(f"  {arm}: {rows[-1]['accuracy']} {rows[-1]['tempered_nll']}", flush=True)
        tables.append(a.table, rows, COLUMNS)
        print(f"{len(runs)} heads of {steps} steps in {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
