"""Train runs, make every predictor of each, and score them on clean, corrupted and out-of-distribution images.

    python -m experiments.posterior.run --data DATA --table rows.csv

One stack per noise multiplier: four methods, five seeds, CIFAR-10's 50,000 training images, the setting and the rates of
experiments/strong_privacy's comparison (b = 4,096, 90 epochs, C = 1, averaged iterates; rates tuned at each ε on validation
images). Scales are chosen and temperatures fitted on mirrored training images, whose confidence is that on new images since
training shows no mirrored ones; neither is charged, alike for every predictor, which favours those that have a scale to choose.
Rows marked ``charged`` are fitted with noise, and ε includes them. Rows are appended per stack; what has its rows is left out.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from dpivon.data import MEAN, STD
from dpivon.metrics import accuracy, adaptive_ece, aurc, batch_scores, brier, ece, nll, ood_auroc
from dpivon.optim.average import window_decay
from dpivon.predict import entropy
from dpivon.priors.processes import images
from dpivon.privacy.accounting import epsilon
from dpivon.stacked import AnyNetwork, PaperNetwork, Run, Stack
from dpivon.study.run.predict import AT_ONCE, normalised
from experiments.leaderboard.priors import tables
from experiments.leaderboard.priors.data import Split, load_split
from experiments.leaderboard.priors.predictions import RESERVE, Map, fit_temperature, fit_vector
from experiments.posterior.predictors import DRAWS, Trained
from experiments.robustness.corruptions import CORRUPTIONS, SEVERITIES, corrupt

DELTA, C, BATCH, EPOCHS = 1e-5, 1.0, 4096, 90
SEEDS = range(5)
#: σ by the name of ε; at the weakest rates are those of ε = 7.5, not tuned.
SIGMAS = {"1": 11.5, "3": 4.3, "7.5": 2.05, "weak": 0.5}
BASE: dict[str, float] = {"momentum": 0.9, "weight_decay": 1e-4}
METHODS: dict[str, tuple[dict[str, float], dict[str, Any]]] = {
    "dp-sgd": ({"1": 0.1, "3": 0.3, "7.5": 0.3, "weak": 0.3}, BASE),
    "dp-adam": (dict.fromkeys(SIGMAS, 0.003), {"weight_decay": 1e-4}),
    "dp-ivon-gradsq": ({"1": 1.0, "3": 3.0, "7.5": 3.0, "weak": 3.0}, {}),
    "dp-steady": (dict.fromkeys(SIGMAS, 3.5), {"trace": 0.25}),
}
FITTED = 10_000
#: Draws of a predictor on corrupted images, of which there are fifty times as many.
SHIFTED_DRAWS = 8
ROW = (
    "method", "epsilon", "epsilon_spent", "noise_multiplier", "lr", "seed", "predictor", "scale", "map", "charged", "draws",
    "condition", "severity", "accuracy", "nll", "ece", "adaptive_ece", "ece_floor", "brier", "aurc",
    "auroc_entropy", "auroc_information", "fit_nll", "seconds", "device", "torch", "commit",
)  # fmt: skip


class Sets:
    """Images of every condition on the device, in bytes: clean, corrupted by severity, out of distribution."""

    def __init__(self, split: Split, *, toy: bool) -> None:
        g = Generator(split.images.device).manual_seed(7)
        raw = (split.score_images * STD + MEAN).clamp(0, 1)
        names = list(CORRUPTIONS)[: 2 if toy else None]
        self.clean, self.labels = split.score_images, split.score_labels
        self.shifted = {s: [corrupt(raw, name, s, seed=0) for name in names] for s in SEVERITIES}
        n, _, side, _ = raw.shape
        noise = torch.rand(raw.shape, generator=g, device=raw.device)
        self.ood = {"leaves": images("leaves", n, g, side, 3), "noise": noise.mul(255).round().to(torch.uint8)}
        self.fit, self.fit_labels = split.images[:FITTED].flip(-1), split.labels[:FITTED]
        self.everyone, self.everyones = split.images.flip(-1), split.labels  # what a charged map is fitted on


def train(label: str, split: Split, *, toy: bool) -> tuple[list[dict[str, Any]], list[Trained], float]:
    """The runs of one σ with what each leaves."""
    batch, epochs = (32, 4) if toy else (BATCH, EPOCHS)
    size = len(split.labels)
    steps = -(-size // batch) * epochs
    sigma, rate = SIGMAS[label], batch / size
    runs, facts = [], []
    for method, (rates, options) in METHODS.items():
        for seed in SEEDS[:1] if toy else SEEDS:
            own = options if method == "dp-steady" else options | {"ema": window_decay(float(steps))}
            number = 7919 * seed + 104729 * list(METHODS).index(method) + 1299709 * list(SIGMAS).index(label)
            runs.append(Run(method, number, sigma, C, rates[label], batch, own))
            spent = epsilon([(sigma, rate, steps), RESERVE], DELTA, "rdp")
            facts.append({"method": method, "epsilon": label, "epsilon_spent": round(spent, 4), "seed": seed})
            facts[-1] |= {"noise_multiplier": sigma, "lr": rates[label]}
    network = PaperNetwork()
    bf16 = split.images.device.type == "cuda"
    stack = Stack(
        runs,
        network,
        split.images,
        split.labels,
        start=torch.stack([network.initial(1000 + fact["seed"]) for fact in facts]),
        dtype=torch.bfloat16 if bf16 else torch.float32,
        block=2 if toy else 32,
        steps=steps,
    )
    began, kept = time.monotonic(), []
    for done in stack.train(steps):
        if 2 * done >= steps:
            kept.append(stack.mean.clone())
    order = [stack._row(i) for i in range(len(runs))]
    iterates, average, std = torch.stack(kept, 1)[order], stack.average[order], stack.std[order]
    last = network.layout.classes * (network.layout.hidden + 1)
    made = [Trained(a, s, x, last) for a, s, x in zip(average, std, iterates, strict=True)]
    seconds = (time.monotonic() - began) / len(runs)
    return facts, made, seconds


@torch.no_grad()
def averaged(network: AnyNetwork, rows: Sequence[Tensor], pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the mean probabilities of the rows, and their mutual information."""
    logs, information, model = [], [], network.model(rows[0]).eval()
    for part in pixels.split(AT_ONCE[pixels.device.type]):
        total, inner, x = torch.zeros(()), torch.zeros(()), normalised(part)
        for i, row in enumerate(rows):
            p = network.load(row, model)(x).float().softmax(-1)
            total, inner = (total + p, inner + entropy(p)) if i else (p, entropy(p))
        mean = total / len(rows)
        logs.append(mean.clamp_min(1e-30).log())
        information.append(entropy(mean) - inner / len(rows))
    return torch.cat(logs), torch.cat(information)


def scores(probs: Tensor, labels: Tensor, g: Generator) -> dict[str, float]:
    """Every score; ``ece_floor`` is what a perfectly calibrated predictor with these probabilities would have."""
    drawn = torch.multinomial(probs.float(), 1, generator=g).squeeze(1)
    found = {"accuracy": accuracy, "nll": nll, "ece": ece, "adaptive_ece": adaptive_ece, "brier": brier, "aurc": aurc}
    return {k: f(probs, labels) for k, f in found.items()} | {"ece_floor": ece(probs, drawn)}


def predicted(network: AnyNetwork, trained: Trained, sets: Sets, seed: int, draws: int) -> list[dict[str, Any]]:
    """Rows of one run on clean and OOD images, for every predictor, raw and at its temperature."""
    device = trained.average.device
    found = []
    for kind, scale in trained.wanted:
        g = Generator(device).manual_seed(seed)
        rows = trained.rows(kind, scale, draws, g)
        fit, _ = averaged(network, rows, sets.fit)
        clean, information = averaged(network, rows, sets.clean)
        ood = {name: averaged(network, rows, pixels) for name, pixels in sets.ood.items()}
        fitted = maps(fit, sets.fit_labels, g)
        if kind == "mean":
            fitted += charged_maps(averaged(network, rows, sets.everyone)[0], sets.everyones, g)
        for name, charged, f in fitted:
            own = {"predictor": kind, "scale": scale, "map": name, "charged": int(charged), "draws": len(rows)}
            own |= {"fit_nll": nll(f(fit), sets.fit_labels)}
            shown = f(clean)
            found.append(own | {"condition": "clean", "severity": 0} | scores(shown, sets.labels, g))
            for other, (logs, mutual) in ood.items():
                aurocs = {"auroc_entropy": ood_auroc(entropy(shown), entropy(f(logs)))}
                if len(rows) > 1:
                    aurocs["auroc_information"] = ood_auroc(information, mutual)
                found.append(own | {"condition": other, "severity": 0} | aurocs)
    return found


def shifted(
    network: AnyNetwork, trained: Trained, sets: Sets, seed: int, draws: int, picks: set[tuple[str, float]]
) -> list[dict[str, Any]]:
    """Rows of one run on corrupted images, by severity: means over the corruptions."""
    found = []
    for kind, scale in sorted(picks):
        g = Generator(trained.average.device).manual_seed(seed)
        rows = trained.rows(kind, scale, draws, g)
        fit, _ = averaged(network, rows, sets.fit)
        fitted = maps(fit, sets.fit_labels, g)
        logs = {
            severity: [averaged(network, rows, pixels)[0] for pixels in each] for severity, each in sets.shifted.items()
        }
        for name, charged, f in fitted[:2]:
            own = {"predictor": kind, "scale": scale, "map": name, "charged": int(charged), "draws": len(rows)}
            for severity, each in logs.items():
                probs = torch.stack([f(one) for one in each])
                every = [
                    s | {"aurc": aurc(p, sets.labels)}
                    for s, p in zip(batch_scores(probs, sets.labels), probs, strict=True)
                ]
                means = {k: sum(s[k] for s in every) / len(every) for k in every[0] if k in ROW}
                found.append(own | {"condition": "shift", "severity": severity} | means)
    return found


def maps(fit: Tensor, labels: Tensor, g: Generator) -> list[tuple[str, bool, Any]]:
    """No map, a temperature, and a factor and an offset per class."""
    one = fit_temperature(fit, labels, 0.0, g)
    return [
        ("none", False, torch.exp),
        ("temperature", False, one),
        ("vector", False, fit_vector(fit, labels, one, 0.0, g)),
    ]


def charged_maps(logs: Tensor, labels: Tensor, g: Generator) -> list[tuple[str, bool, Any]]:
    """The same two maps by noisy gradients over all training images, which :data:`RESERVE` pays for: private temperature and
    DP-Platt (Zhang et al., 2023)."""
    one: Map = fit_temperature(logs, labels, RESERVE[0], g)
    return [("temperature", True, one), ("vector", True, fit_vector(logs, labels, one, RESERVE[0], g))]


def best(rows: Sequence[dict[str, Any]], method: str) -> set[tuple[str, float]]:
    """The mean, the iterates, and of every kind of draws the scale with the least NLL on the images that fit, tempered."""
    mine = [r for r in rows if r["method"] == method and r["condition"] == "clean" and r["map"] == "temperature"]
    picks = {("mean", 0.0), ("iterates", 1.0)}
    for kind in {r["predictor"] for r in mine} - {"mean", "iterates"}:
        losses: dict[float, list[float]] = {}
        for r in mine:
            if r["predictor"] == kind:
                losses.setdefault(r["scale"], []).append(r["fit_nll"])
        picks.add((kind, min(losses, key=lambda s: sum(losses[s]))))
    return picks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument(
        "--until", type=float, default=math.inf, help="the time, of date +%%s, after which no stack is begun"
    )
    parser.add_argument("--only", nargs="*", default=list(SIGMAS), help="names of ε")
    parser.add_argument("--toy", action="store_true")
    a = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    split = load_split(a.data, device, judge=True, toy=a.toy)
    began = time.monotonic()
    say = partial(print, flush=True)
    sets = Sets(split, toy=a.toy)
    say(f"images of all conditions: {time.monotonic() - began:.0f} s")
    done = {row["epsilon"] for row in tables.read(a.table)}
    for label in a.only:
        if label in done or time.time() > a.until:
            continue
        facts, made, seconds = train(label, split, toy=a.toy)
        say(f"ε = {label}: trained, {seconds * len(made):.0f} s")
        network = PaperNetwork()
        about = {"seconds": round(seconds, 2)} | tables.facts(device)
        found: list[dict[str, Any]] = []
        for fact, trained in zip(facts, made, strict=True):
            found += [
                fact | about | row for row in predicted(network, trained, sets, fact["seed"], 2 if a.toy else DRAWS)
            ]
        say(f"ε = {label}: clean and OOD images, {time.monotonic() - began:.0f} s since the start")
        tables.append(a.table, [filled(row) for row in found], ROW)
        more: list[dict[str, Any]] = []
        for fact, trained in zip(facts, made, strict=True):
            picks, draws = best(found, fact["method"]), 2 if a.toy else SHIFTED_DRAWS
            more += [fact | about | row for row in shifted(network, trained, sets, fact["seed"], draws, picks)]
        tables.append(a.table, [filled(row) for row in more], ROW)
        say(f"ε = {label}: corrupted images, {time.monotonic() - began:.0f} s since the start")


def filled(row: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 6) if isinstance(v := row.get(k, ""), float) else v for k in ROW}


if __name__ == "__main__":
    main()
