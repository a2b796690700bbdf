"""A private linear layer on a prior's flat features, on CIFAR-10: the recipe with ``start_from=``, and other methods there.

    python -m experiments.leaderboard.linear paper --data DATA --work WORK --table linear.csv --epsilons 1 3 --seeds 0
    python -m experiments.leaderboard.linear wide --data DATA --work WORK --table linear.csv --judge --seeds 1 2 3

``paper`` is the library's prior ``images-32`` of the paper's CNN: 3,584 features of its three blocks. ``wide`` is the prior of
WRN-16-4 in ``wide/results``: 7,168 features of its three groups, means over 4 × 4 places. ``plain`` are the features of
``paper``, each by itself brought to mean 0 and variance 1 on images of the process, and not flat. All are averaged over ten
shifted and mirrored copies of an image, and made once: WORK keeps them. An arm is METHOD:RATE; ``dp-steady`` by itself is the
recipe with its defaults, and the other methods have its plan, σ and averaging. Rows that the table has are not made
again. A GPU is used where there is one; the features of ``wide`` take hours without.
Without ``--judge`` 45,000 training images are trained on and 5,000 scored, with it all 50,000 and the test set.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dpivon
from dpivon.data import normalised
from dpivon.data.images import tuning_places
from dpivon.machine import hardware_name
from dpivon.metrics import accuracy, ece, nll
from dpivon.models import PaperCNN
from dpivon.optim.average import window_decay
from dpivon.priors import Features, start_from
from dpivon.priors.features import made_up
from dpivon.privacy.temperature import temperature_cost, temperature_noise
from dpivon.recipe import HELD_OUT
from dpivon.temperature import Tempered, temper
from experiments.leaderboard.priors import tables
from experiments.leaderboard.priors.data import cached
from experiments.leaderboard.priors.scores import best_temperature
from experiments.leaderboard.wide.network import load_wide, process_of

WIDE = Path(__file__).parent / "wide" / "results" / "wide-places.npz"
EPSILONS, DELTA, BATCH, EPOCHS, DRAWS = (1.0, 2.0, 3.0, 4.0, 8.0), 1e-5, 4096, 90, 32
RECIPE = "dp-steady"
CELL = ("network", "features", "split", "epsilon", "method", "lr", "seed", "batch", "epochs")
#: How many features there are, and how many the last map alone has: rows of before earlier maps were among them.
ALL_MAPS, LAST_MAP = {"paper": "3584", "wide": "7168", "plain": "3584"}, {"paper": "2048", "wide": "4096"}
#: Of the draws and of the mean: raw, at the best temperature by training images, and at the one that the run paid for.
SCORES = tuple(f"{p}_{kind}{s}" for p in ("draws", "mean") for kind in ("", "tempered_") for s in ("nll", "ece"))
COLUMNS = (*CELL, "delta", "max_grad_norm", "noise_multiplier", "steps", "epsilon_spent", "train_size", "temperature")
COLUMNS += (
    "accuracy",
    "nll",
    "ece",
    "draws_accuracy",
    "mean_accuracy",
    *SCORES,
    "seconds",
    "device",
    "torch",
    "commit",
)


def process_images(network: str, count: int | None = None) -> Tensor:
    """Images of the random process that this network's prior is of."""
    return made_up(process_of(WIDE) if network == "wide" else "filters", 32, count=count)


def features_of(network: str, work: Path, device: torch.device, toy: bool = False) -> Features:
    """The prior's features, flat on images of its process; kept, since those of ``wide`` take a GPU."""
    path = work / f"{network}{'-toy' * toy}-features.pt"
    if not path.is_file():
        if network == "wide":
            body = load_wide(WIDE, places=4)
        else:
            body = PaperCNN()
            start_from(body, "images-32")
        public = process_images(network, 512 if toy else None).to(device)
        features = Features(body.to(device), public, shift=2, mirror=True)
        if network == "plain":
            features.matrix = features.seen(public).std(0).clamp_min(1e-6).reciprocal().diag()
        work.mkdir(parents=True, exist_ok=True)
        torch.save(features, path)
    found: Features = torch.load(path, map_location=device, weights_only=False)
    return found


@torch.no_grad()
def made(network: str, data: Path, work: Path, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """Flat features and labels of the training and the test images; kept too."""
    path = work / f"{network}.pt"
    if not path.is_file():
        began, features = time.monotonic(), features_of(network, work, device)
        found = {}
        for name, part in zip(("train", "test"), cached(data), strict=True):
            x, y = (t.to(device) for t in normalised(part))
            found[name] = features(x), y
            print(f"{network}, {name}: {tuple(found[name][0].shape)}, {time.monotonic() - began:.0f} s", flush=True)
        torch.save(found, path)
    loaded: dict[str, tuple[Tensor, Tensor]] = torch.load(path, map_location=device)
    return loaded


def trained(method: str, lr: str, epsilon: float, seed: int, x: Tensor, y: Tensor, plan: dict[str, Any]) -> Tempered:
    """A linear layer from zero; the recipe by its own door, another method with the recipe's plan and no temperature."""
    last = nn.Linear(x.shape[1], 10, device=x.device)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    # Public data: a seed makes the run one that can be made again.
    given = {**plan, "target_epsilon": epsilon, "seed": seed, "progress": False}
    if method == RECIPE:
        return dpivon.steady(last, x, y, held_out=HELD_OUT, **given, **({"lr": float(lr)} if lr else {}))
    steps = -(-len(x) // plan["batch_size"]) * plan["epochs"]
    also = [temperature_cost(temperature_noise(0.1 * epsilon, DELTA))]
    options = {"ema": window_decay(float(steps))}
    return Tempered(dpivon.fit(last, x, y, method=method, lr=float(lr), also=also, options=options, **given), 1.0)


def scored(found: Tempered, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> dict[str, float]:
    """What a run's mean and draws of its posterior score on ``test``."""
    fitted: Any = found.predictor
    x, y = test
    own = found.predict(x, samples=DRAWS).probs
    row = {"accuracy": accuracy(own, y), "nll": nll(own, y), "ece": ece(own, y), "temperature": found.temperature}
    for name, samples in (("draws", DRAWS), ("mean", 0)):
        probs = fitted.predict(x, samples).probs
        t = best_temperature(fitted.predict(train[0], samples).probs, train[1])
        row[f"{name}_accuracy"] = accuracy(probs, y)
        row |= {f"{name}_nll": nll(probs, y), f"{name}_ece": ece(probs, y)}
        row |= {f"{name}_tempered_nll": nll(temper(probs, t), y), f"{name}_tempered_ece": ece(temper(probs, t), y)}
    return {name: round(float(value), 5) for name, value in row.items()}


def run(cell: dict[str, str], train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """One row."""
    began, epsilon = time.monotonic(), float(cell["epsilon"])
    plan = {"delta": DELTA, "batch_size": int(cell["batch"]), "epochs": int(cell["epochs"])}
    found = trained(cell["method"], cell["lr"], epsilon, int(cell["seed"]), *train, plan)
    seconds, fitted = time.monotonic() - began, found.predictor
    assert isinstance(fitted, dpivon.Fitted)
    spent = fitted.account.get_epsilon(DELTA)
    facts: dict[str, Any] = {"delta": DELTA, "max_grad_norm": 1.0, "train_size": fitted.budget.dataset_size}
    facts |= {"noise_multiplier": round(fitted.budget.noise_multiplier, 4), "steps": fitted.budget.steps}
    facts |= {"epsilon_spent": round(spent, 5), "seconds": round(seconds, 1)} | tables.facts(train[0].device)
    return {**cell, **facts, "device": hardware_name(train[0].device), **scored(found, train, test)}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=tuple(ALL_MAPS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a folder for features")
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--arms", nargs="+", default=[RECIPE], help="METHOD:RATE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--judge", action="store_true")
    a = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = made(a.network, a.data, a.work, device)
    train, test = parts["train"], parts["test"]
    if not a.judge:
        kept, held = (torch.from_numpy(places).to(device) for places in tuning_places(len(train[1])))
        train, test = ((train[0][places], train[1][places]) for places in (kept, held))
    split = "test" if a.judge else "validation"
    known = {tuple(row[name] for name in CELL) for row in tables.read(a.table)}
    for seed in a.seeds:
        for epsilon in a.epsilons:
            for method, _, lr in (arm.partition(":") for arm in a.arms):
                plan = (f"{epsilon:g}", method, lr, str(seed), str(a.batch), str(a.epochs))
                own = (a.network, str(train[0].shape[1]), split, *plan)
                if own in known:
                    continue
                row = run(dict(zip(CELL, own, strict=True)), train, test)
                tables.append(a.table, [row], COLUMNS)
                told = " ".join(f"{n}={row[n]}" for n in ("accuracy", "nll", "ece", "mean_tempered_nll", "seconds"))
                print(*own, told, flush=True)


if __name__ == "__main__":
    main()
