"""Train runs, make every predictor of each, and score them on clean, corrupted and out-of-distribution images.

    python -m experiments.posterior.run --data DATA --table rows.csv --parts 7.5:base 7.5:shift

CIFAR-10's 50,000 training images, the setting and the rates of experiments/strong_privacy's comparison (b = 4,096, 90 epochs,
C = 1, averaged iterates; rates tuned at each ε on validation images). Seeds of an arm and ε are trained in one stack:

- ``base``: four methods; every predictor on clean and OOD images, and private prediction sets (sets.csv, beside the table);
- ``shift``: the same runs under fifteen corruptions, for the scales that ``base`` chose over its seeds;
- ``joint``: ensembles of four members of DP-SGD that share one budget: each has the σ at which all four together cost ε;
- ``bound``: DP-SGD with C = 4 and 16, two rates each (Bu et al., 2023: a large C calibrates).

Scales are chosen and temperatures fitted on mirrored training images, whose confidence is that on new images since training
shows no mirrored ones; neither is charged, alike for every predictor, which favours those that have a scale to choose. Rows
marked ``charged`` are fitted with noise, and ε includes them. What has its rows is left out; ``--work`` keeps trained runs.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from dpivon.data import MEAN, STD
from dpivon.metrics import accuracy, adaptive_ece, aurc, batch_scores, brier, ece, nll, ood_auroc
from dpivon.optim.average import window_decay
from dpivon.predict import entropy
from dpivon.priors.processes import images
from dpivon.privacy.accounting import epsilon
from dpivon.stacked import PaperNetwork, Run, Stack
from dpivon.study.run.evaluation import AT_ONCE, normalised
from experiments.leaderboard.priors import tables
from experiments.leaderboard.priors.data import Split, load_split
from experiments.leaderboard.priors.predictions import RESERVE, Map, fit_temperature, fit_vector
from experiments.posterior import sets as prediction_sets
from experiments.posterior.predictors import DRAWS, Trained
from experiments.robustness.corruptions import COMMON, SEVERITIES, corrupt

DELTA, C, BATCH, EPOCHS = 1e-5, 1.0, 4096, 90
SEEDS = range(5)
#: σ by the name of ε; at ε = 121 the rates are those of ε = 7.5, not tuned.
SIGMAS = {"1": 11.5, "3": 4.3, "7.5": 2.05, "121": 0.5}
BASE: dict[str, float] = {"momentum": 0.9, "weight_decay": 1e-4}
METHODS: dict[str, tuple[dict[str, float], dict[str, Any]]] = {
    "dp-sgd": ({"1": 0.1, "3": 0.3, "7.5": 0.3, "121": 0.3}, BASE),
    "dp-adam": (dict.fromkeys(SIGMAS, 0.003), {"weight_decay": 1e-4}),
    "dp-ivon-gradsq": ({"1": 1.0, "3": 3.0, "7.5": 3.0, "121": 3.0}, {}),
    "dp-steady": (dict.fromkeys(SIGMAS, 3.5), {"trace": 0.25}),
}
MEMBERS, JOINED = 4, ("dp-sgd",)
#: Larger bounds, and rates in units of the tuned rate over C.
BOUNDS, FACTORS = (4.0, 16.0), (1.0, 2.0)
FITTED = 10_000
#: Draws of a predictor on corrupted images, of which there are seventy-five times as many, and which predictors.
SHIFTED_DRAWS, SHIFTED = 8, ("own", "swag", "last")
#: Runs in one stack: enough to fill a GPU, and few enough to leave most of its memory.
TOGETHER = 20
ROW = (
    "method", "epsilon", "epsilon_spent", "noise_multiplier", "lr", "seed", "predictor", "scale", "map", "charged", "draws",
    "condition", "severity", "accuracy", "nll", "ece", "adaptive_ece", "ece_floor", "brier", "aurc",
    "auroc_entropy", "auroc_information", "fit_nll", "seconds", "device", "torch", "commit",
)  # fmt: skip
#: By which rows an arm is known to be done: predictor and condition.
ARMS = {
    "base": ("mean", "clean"),
    "shift": ("mean", "shift"),
    "joint": ("ensemble", "clean"),
    "bound": ("bound", "clean"),
}
#: What there is to measure, best first.
PARTS = tuple(f"{label}:{arm}" for arm in ARMS for label in ("7.5", "1", "3", "121"))
#: Runs of one seed.
RUNS = {
    "base": len(METHODS),
    "shift": len(METHODS),
    "joint": MEMBERS * len(JOINED),
    "bound": len(BOUNDS) * len(FACTORS),
}
Rows = list[dict[str, Any]]
Body = Callable[[Tensor], Tensor]


class Sets:
    """Images of every condition on the device, in bytes: clean, corrupted by severity, out of distribution."""

    def __init__(self, split: Split, *, toy: bool) -> None:
        g = Generator(split.images.device).manual_seed(7)
        self.raw, self.names = (split.score_images * STD + MEAN).clamp(0, 1), COMMON[: 2 if toy else None]
        self.clean, self.labels = split.score_images, split.score_labels
        n, _, side, _ = self.raw.shape
        noise = torch.rand(self.raw.shape, generator=g, device=self.raw.device)
        self.ood = {"leaves": images("leaves", n, g, side, 3), "noise": noise.mul(255).round().to(torch.uint8)}
        self.fit, self.fit_labels = split.images[:FITTED].flip(-1), split.labels[:FITTED]
        self.everyone, self.everyones = split.images.flip(-1), split.labels  # what a charged map is fitted on

    @cache  # noqa: B019  one object per process
    def shifted(self, severity: int) -> list[Tensor]:
        return [corrupt(self.raw, name, severity, seed=0) for name in self.names]


@cache
def joint_sigma(sigma: float, rate: float, steps: int) -> float:
    """The σ of each of MEMBERS runs that together cost what one run at ``sigma`` does, from above."""
    spent, low, high = epsilon([(sigma, rate, steps), RESERVE], DELTA, "rdp"), sigma, MEMBERS * sigma + 1.0
    while high - low > 1e-3 * sigma:
        middle = (low + high) / 2
        dear = epsilon([(middle, rate, MEMBERS * steps), RESERVE], DELTA, "rdp") > spent
        low, high = (middle, high) if dear else (low, middle)
    return high


def planned(
    arm: str, label: str, seed: int, batch: int, rate: float, steps: int
) -> list[tuple[dict[str, Any], Run, int]]:
    """The runs of an arm with their facts and the seed of their first weights."""
    sigma, found = SIGMAS[label], []
    spent = round(epsilon([(sigma, rate, steps), RESERVE], DELTA, "rdp"), 4)
    first = 7919 * seed + 1299709 * list(SIGMAS).index(label)
    ema = {"ema": window_decay(float(steps))}
    for place, (method, (rates, options)) in enumerate(METHODS.items()):
        own = options if method == "dp-steady" else options | ema
        fact = {"method": method, "epsilon": label, "epsilon_spent": spent, "seed": seed}
        if arm in ("base", "shift"):
            wanted = [(sigma, C, rates[label], 0)]
        elif arm == "joint" and method in JOINED:
            less = joint_sigma(sigma, rate, steps)
            nearest = min(SIGMAS, key=lambda name: abs(math.log(SIGMAS[name] / less)))
            wanted = [(less, C, rates[nearest], member) for member in range(MEMBERS)]
        elif arm == "bound" and method == "dp-sgd":
            wanted = [(sigma, c, f * rates[label] / c, 0) for c in BOUNDS for f in FACTORS]
        else:
            continue
        for i, (noise, bound, lr, member) in enumerate(wanted):
            number = (
                first + 104729 * place + (0 if arm in ("base", "shift") else 32452843 * (2 * i + 1 + (arm == "bound")))
            )
            run = Run(method, number, noise, bound, lr, batch, own)
            found.append((fact | {"noise_multiplier": noise, "lr": lr}, run, 1000 + seed + 100 * member))
    return found


def train(
    arm: str, label: str, seeds: Sequence[int], split: Split, work: Path, *, toy: bool
) -> dict[int, tuple[Rows, list[Run], list[Trained]]]:
    """By seed the runs of an arm with what each leaves: from ``work``, where they are kept, or else trained in one stack."""
    batch, epochs = (32, 4) if toy else (BATCH, EPOCHS)
    size = len(split.labels)
    steps = -(-size // batch) * epochs
    plans = {seed: planned(arm, label, seed, batch, batch / size, steps) for seed in seeds}
    network, device = PaperNetwork(), split.images.device
    last = network.layout.classes * (network.layout.hidden + 1)
    kept = {seed: work / f"{'base' if arm == 'shift' else arm}-{label}-{seed}.pt" for seed in seeds}
    if new := [seed for seed in seeds if not kept[seed].is_file()]:
        plan = [run for seed in new for run in plans[seed]]
        stack = Stack(
            [run for _, run, _ in plan],
            network,
            split.images,
            split.labels,
            start=torch.stack([network.initial(first) for *_, first in plan]),
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            block=2 if toy else 32,
            steps=steps,
        )
        began, seen = time.monotonic(), []
        for done in stack.train(steps):
            if 2 * done >= steps:
                seen.append(stack.mean.clone())
        order = [stack._row(i) for i in range(len(plan))]
        found = stack.average[order], stack.std[order], torch.stack(seen, 1)[order]
        seconds = round((time.monotonic() - began) / len(plan), 2)
        work.mkdir(parents=True, exist_ok=True)
        for seed, *parts in zip(new, *(t.split(len(plan) // len(new)) for t in found), strict=True):
            torch.save((seconds, *(part.clone() for part in parts)), kept[seed].with_suffix(".partial"))
            kept[seed].with_suffix(".partial").replace(kept[seed])
    out = {}
    for seed in seeds:
        seconds, *parts = torch.load(kept[seed], map_location=device, weights_only=True)
        about = {"seconds": seconds} | tables.facts(device)
        made = [Trained(a, s, x, last) for a, s, x in zip(*parts, strict=True)]
        out[seed] = [fact | about for fact, *_ in plans[seed]], [run for _, run, _ in plans[seed]], made
    return out


@cache
def passes(network: PaperNetwork, device: torch.device) -> tuple[nn.Module, Body, nn.Module]:
    """A model to load rows into, what it does up to its last layer, and that layer.

    Compiled on a GPU, where norms, ReLU and pooling are then one pass; convolutions are in TF32 either way.
    """
    model: Any = network.model(torch.zeros(network.size, device=device)).eval()
    body = nn.Sequential(model.features, model.head[:-1])
    return model, torch.compile(body, dynamic=False) if device.type == "cuda" else body, model.head[-1]


@torch.no_grad()
def averaged(
    network: PaperNetwork, rows: Sequence[Tensor], pixels: Tensor, *, shared: bool = False
) -> tuple[Tensor, Tensor]:
    """Log of the mean probabilities of the rows, and their mutual information.

    ``shared``: the rows differ in their last layer alone.
    """
    logs, information, (model, body, last) = [], [], passes(network, pixels.device)
    for part in pixels.split(AT_ONCE[pixels.device.type]):
        total, inner, x, features = torch.zeros(()), torch.zeros(()), normalised(part), torch.zeros(())
        for i, row in enumerate(rows):
            network.load(row, model)
            features = features if shared and i else body(x)
            p = last(features).float().softmax(-1)
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


def clean_rows(
    network: PaperNetwork, kind: str, scale: float, rows: Sequence[Tensor], sets: Sets, g: Generator
) -> tuple[Rows, dict[tuple[str, bool], Tensor]]:
    """Rows of one predictor on clean and OOD images under every map, and its probabilities on clean images by map."""
    predict = partial(averaged, network, rows, shared=kind == "last")
    (fit, _), (clean, information) = predict(sets.fit), predict(sets.clean)
    ood = {name: predict(pixels) for name, pixels in sets.ood.items()}
    fitted = maps(fit, sets.fit_labels, g)
    if kind == "mean":
        fitted += charged_maps(predict(sets.everyone)[0], sets.everyones, g)
    found, probs = [], {}
    for name, charged, f in fitted:
        own = {"predictor": kind, "scale": scale, "map": name, "charged": int(charged), "draws": len(rows)}
        own |= {"fit_nll": nll(f(fit), sets.fit_labels)}
        shown = probs[name, charged] = f(clean)
        found.append(own | {"condition": "clean", "severity": 0} | scores(shown, sets.labels, g))
        for other, (logs, mutual) in ood.items():
            aurocs = {"auroc_entropy": ood_auroc(entropy(shown), entropy(f(logs)))}
            if len(rows) > 1:
                aurocs["auroc_information"] = ood_auroc(information, mutual)
            found.append(own | {"condition": other, "severity": 0} | aurocs)
    return found, probs


def shift_rows(
    network: PaperNetwork, kind: str, scale: float, rows: Sequence[Tensor], sets: Sets, g: Generator
) -> Rows:
    """Rows of one predictor on corrupted images, by severity: means over the corruptions."""
    predict = partial(averaged, network, rows, shared=kind == "last")
    fit, found = predict(sets.fit)[0], []
    for severity in SEVERITIES:
        logs = [predict(pixels)[0] for pixels in sets.shifted(severity)]
        for name, charged, f in maps(fit, sets.fit_labels, g)[:2]:
            own = {"predictor": kind, "scale": scale, "map": name, "charged": int(charged), "draws": len(rows)}
            probs = torch.stack([f(one) for one in logs])
            every = batch_scores(probs, sets.labels.expand(len(logs), -1))
            means = {k: sum(s[k] for s in every) / len(every) for k in every[0] if k in ROW}
            means["aurc"] = sum(aurc(one, sets.labels) for one in probs) / len(probs)
            found.append(own | {"condition": "shift", "severity": severity} | means)
    return found


def predicted(
    network: PaperNetwork,
    arm: str,
    facts: Rows,
    runs: Sequence[Run],
    made: Sequence[Trained],
    sets: Sets,
    known: Rows,
    draws: int,
) -> tuple[Rows, Rows]:
    """The rows of an arm's table, and those of its prediction sets."""
    found: Rows = []
    covered: Rows = []
    device = sets.labels.device
    if arm == "joint":
        for start in range(0, len(runs), MEMBERS):
            g = Generator(device).manual_seed(facts[start]["seed"])
            rows = [t.average for t in made[start : start + MEMBERS]]
            part = clean_rows(network, "ensemble", MEMBERS, rows, sets, g)[0]
            label = facts[start]["epsilon"]
            if any((r["epsilon"], r["condition"]) == (label, "shift") for r in known):  # there is what to compare with
                part += shift_rows(network, "ensemble", MEMBERS, rows, sets, g)
            found += [facts[start] | row for row in part]
        return found, covered
    for fact, run, trained in zip(facts, runs, made, strict=True):
        seed = fact["seed"]
        if arm == "bound":
            g = Generator(device).manual_seed(seed)
            found += [fact | r for r in clean_rows(network, "bound", run.max_grad_norm, [trained.average], sets, g)[0]]
            continue
        wanted = trained.wanted if arm == "base" else sorted(best(known, fact["method"], fact["epsilon"]))
        for kind, scale in wanted:
            g = Generator(device).manual_seed(seed)
            rows = trained.rows(kind, scale, draws if arm == "base" else min(draws, SHIFTED_DRAWS), g)
            if arm == "shift":
                found += [fact | row for row in shift_rows(network, kind, scale, rows, sets, g)]
                continue
            more, probs = clean_rows(network, kind, scale, rows, sets, g)
            found += [fact | row for row in more]
            if kind in ("mean", "iterates"):
                asked = ("temperature", kind == "mean")
                own = {"predictor": kind, "map": asked[0], "charged": int(asked[1])}
                covered += [fact | own | row for row in prediction_sets.rows(probs[asked], sets.labels, seed)]
    return found, covered


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


def best(rows: Sequence[dict[str, Any]], method: str, label: str) -> set[tuple[str, float]]:
    """The mean, the iterates, and of kinds of draws the scale with the least NLL on the images that fit, tempered."""
    mine = [
        r
        for r in rows
        if (r["method"], r["epsilon"], r["condition"], r["map"]) == (method, label, "clean", "temperature")
    ]
    picks = {("mean", 0.0), ("iterates", 1.0)}
    for kind in {r["predictor"] for r in mine} & set(SHIFTED):
        losses: dict[float, list[float]] = {}
        for r in mine:
            if r["predictor"] == kind:
                losses.setdefault(float(r["scale"]), []).append(float(r["fit_nll"]))
        picks.add((kind, min(losses, key=lambda s: sum(losses[s]))))
    return picks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument(
        "--work", type=Path, default=Path("study-output/posterior"), help="keeps trained runs: 30 MB each"
    )
    parser.add_argument(
        "--until", type=float, default=math.inf, help="the time, of date +%%s, after which no seed is begun"
    )
    parser.add_argument("--lead", type=float, default=0.0, help="seconds that a stack takes: none is begun so late")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS), metavar="EPSILON:ARM")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--toy", action="store_true")
    a = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    split = load_split(a.data, device, judge=True, toy=a.toy)
    began = time.monotonic()
    say = partial(print, flush=True)
    sets, network = Sets(split, toy=a.toy), PaperNetwork()
    for label, arm in (part.split(":") for part in a.parts):
        known: Rows = [dict(row) for row in tables.read(a.table)]
        done = {r["seed"] for r in known if (r["epsilon"], r["predictor"], r["condition"]) == (label, *ARMS[arm])}
        left = [seed for seed in a.seeds if str(seed) not in done]
        many = TOGETHER // RUNS[arm]
        for seeds in (left[i : i + many] for i in range(0, len(left), many)):
            if time.time() > a.until - a.lead:
                break
            for seed, (facts, runs, made) in train(arm, label, seeds, split, a.work, toy=a.toy).items():
                say(f"ε = {label}, {arm}, seed {seed}: trained, {time.monotonic() - began:.0f} s since the start")
                found, covered = predicted(network, arm, facts, runs, made, sets, known, 2 if a.toy else DRAWS)
                if covered:
                    rows = [filled(r, prediction_sets.ROW) for r in covered]
                    tables.append(a.table.with_name("sets.csv"), rows, prediction_sets.ROW)
                tables.append(a.table, [filled(row, ROW) for row in found], ROW)
                say(f"ε = {label}, {arm}, seed {seed}: scored, {time.monotonic() - began:.0f} s since the start")
                if time.time() > a.until:
                    break


def filled(row: dict[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    return {k: round(v, 6) if isinstance(v := row.get(k, ""), float) else v for k in columns}


if __name__ == "__main__":
    main()
