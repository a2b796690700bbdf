"""``dpivon demo``: private methods side by side on real handwritten digits, in about a minute on a laptop.

Every method gets the same Poisson batches, stream of privacy noise and first weights, but for ``--prior``. Learning rates are
the registry's, chosen out of three on the validation digits at ε = 4, δ = 1e-4 and 40 epochs, which ε does not cover.
DP-Steady's was set on CIFAR-10 instead.
"""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpivon._version import __version__
from dpivon.data.images import Digits, Split, load_digits
from dpivon.diagnostics import Diagnostics, Row
from dpivon.errors import bad, check_number, check_whole
from dpivon.machine import cpu_name, one_thread
from dpivon.methods import Learner, Method, describe
from dpivon.methods import method as make
from dpivon.metrics import accuracy, brier, ece, nll
from dpivon.models import SmallCNN
from dpivon.posterior import Posterior
from dpivon.priors.features import Features
from dpivon.privacy import PrivacyEngine
from dpivon.report.chart import BLUE, GREEN, GREY, ORANGE, Axis, Panel, Point, Series
from dpivon.report.figures import draw, draw_panels
from dpivon.report.testset import BINS, reliability
from dpivon.terminal import Bar, print_facts

EPSILON, DELTA, EPOCHS = 4.0, 1e-4, 40  # what the learning rates were chosen at
METHODS = ("dp-sgd", "dp-adam", "dp-ivon-gradsq", "dp-steady")
PRIOR, PRIOR_TITLE = "strokes-8", "DP-Steady, prior"  # learned from made-up pen strokes
OPTIONS = {"dp-sgd": {"weight_decay": 0.0}, "dp-adam": {"weight_decay": 0.0}}
BATCH_SIZE, MAX_GRAD_NORM, SAMPLES, TRAIN = 256, 1.0, 32, 1297
MARKER = ".dpivon-demo"  # a folder with this file in it is ours to write into again
NOISE_ONLY = math.erf(math.sqrt(0.5))  # P(|z| ≤ 1) for a standard normal z
_PURPOSES = ("weights", "batches", "theta", "noise", "prediction", "masks")


@dataclass(frozen=True)
class Result:
    """One line of the table: a trained model, one way to predict with it, and its scores on the test split.

    ``samples`` is how many posterior draws the prediction averages; 0 is one pass at the mean, or at the point
    estimate of an optimizer without a posterior.
    """

    method: str
    prediction: str
    samples: int
    epsilon: float
    delta: float
    noise_multiplier: float
    steps: int
    lr: float
    seed: int
    test_examples: int
    accuracy: float
    nll: float
    ece: float
    brier: float


@dataclass(frozen=True, eq=False)
class Run:
    """A finished training run; ``initial_std`` is that of IVON's posterior before the first step, and 0 for others."""

    method: Method
    learner: Learner
    epsilon: float
    noise_multiplier: float
    steps: int
    diagnostics: Diagnostics
    initial_std: float


def run_demo(
    output: str | os.PathLike[str],
    *,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    seed: int = 0,
    epochs: int = EPOCHS,
    methods: Sequence[str] = (),
    prior: bool = False,
    quiet: bool = False,
) -> list[Result]:
    """Train ``methods`` (DP-SGD, DP-Adam, DP-IVON-Gradsq and DP-Steady by default), each within (ε, δ), and compare them.

    Writes ``results.csv`` and ``reliability.png``, ``posterior.safetensors`` where there is a posterior, and
    ``posterior_width.png`` and ``diagnostics.csv`` about an IVON; where several methods write one of the last three, their
    names are appended. Returns the lines of the table. The same seed gives the same table on the same machine.

    ``prior`` adds DP-Steady on the features of the prior ``strokes-8``.
    """
    chosen = [(describe(name), False) for name in methods or METHODS]
    if prior:
        chosen.append((replace(describe("dp-steady"), title=PRIOR_TITLE), True))
    if len(set(methods)) < len(methods):
        raise bad("method", list(methods), "names one twice", "Name each once")
    epsilon = check_number("epsilon", epsilon, "Use a budget such as 4", above=0.0)
    delta = check_number("delta", delta, "Use a value such as 1e-4", above=0.0)
    if delta >= 1 / TRAIN:
        problem = f"is not below 1/N = {1 / TRAIN:.3g}, so publishing one digit outright would be allowed"
        raise bad("delta", delta, problem, "Use a value such as 1e-4")
    epochs = check_whole("epochs", epochs, f"Use about {EPOCHS}", at_least=1)
    seed = check_whole("seed", seed, "Use a small number such as 0")
    if seed >= 2**32:
        raise bad("seed", seed, "must be less than 4294967296", "Use a small number such as 0")
    folder, began = _claim(Path(output)), time.perf_counter()

    from rich.console import Console

    console, digits = Console(quiet=quiet, highlight=False), load_digits()
    _introduce(console, digits, len(chosen), epsilon, delta, epochs, seed)
    results, predictions, runs, written = [], [], [], ["results.csv", "reliability.png"]
    several = sum(method.samples > 0 for method, _ in chosen) > 1
    for method, from_prior in chosen:
        network, seen, test = on_features(digits) if from_prior else (None, digits.train, digits.test)
        with one_thread(), Bar(epochs, float, not quiet, console) as bar:
            shown = partial(bar.at, note=f"  {method.title}")
            plan: dict[str, Any] = {
                "epsilon": epsilon,
                "delta": delta,
                "epochs": epochs,
                "seed": seed,
                "network": network,
            }
            run = train(method, seen, **plan, on_epoch=shown)
        for prediction, samples in [("mean", 0), (f"{SAMPLES} samples", SAMPLES)] if method.samples else [("point", 0)]:
            with one_thread():
                probs = run.learner.predict(test.x, samples, generator=stream(seed, "prediction")).probs
            facts = (run.epsilon, delta, run.noise_multiplier, run.steps, method.lr, seed, len(digits.test))
            scores = (score(probs, digits.test.y) for score in (accuracy, nll, ece, brier))
            results.append(Result(method.title, prediction, samples, *facts, *scores))
            predictions.append((f"{method.title}, {prediction}", probs, BLUE))
        suffix = f"-{method.name}{'-prior' * from_prior}" if several else ""
        posterior: Any = run.learner.posterior()
        if method.samples:
            written.append(f"posterior{suffix}.safetensors")
            guarantee = {"epsilon": f"{run.epsilon:.6g}", "delta": f"{delta:g}", "seed": str(seed)}
            metadata = posterior.metadata | guarantee | {"data": "sklearn digits"}
            replace(posterior, metadata=metadata).save(folder / written[-1])
        if run.initial_std:
            written += [f"posterior_width{suffix}.png", f"diagnostics{suffix}.csv"]
            panels = _width_panels(posterior, run.diagnostics.rows, run.initial_std)
            draw_panels(panels, folder / f"posterior_width{suffix}")
            run.diagnostics.to_csv(folder / written[-1])
            runs.append(run)
    draw([reliability(predictions, digits.test.y)], None, folder, ["png"])
    with open(folder / "results.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=[f.name for f in fields(Result)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(result) for result in results)
    _conclude(console, results, runs)
    names = f"{', '.join(written[:-1])} and {written[-1]}"
    seconds = time.perf_counter() - began
    console.print(f"Wrote {names} to {folder}{os.sep} in {seconds:.0f} s.", soft_wrap=True, markup=False)
    return results


def train(
    method: Method,
    data: Split,
    *,
    epsilon: float,
    delta: float,
    epochs: int,
    seed: int,
    network: nn.Module | None = None,
    on_epoch: Callable[..., None] = lambda epoch, epsilon: None,
    **options: Any,
) -> Run:
    """Train a :class:`SmallCNN` within (``epsilon``, ``delta``); a method that is not private, without either (ε = ∞).

    Or train ``network``, with its own first weights.
    ``on_epoch(epoch, epsilon=ε)`` is called after each epoch with what has been spent.
    """
    private, engine = method.name.startswith("dp"), PrivacyEngine(accountant="rdp")
    with torch.random.fork_rng(devices=[]):  # layers draw first weights and masks from the global generator
        torch.manual_seed(stream(seed, "weights").initial_seed())
        network = SmallCNN() if network is None else network
        torch.manual_seed(stream(seed, "masks").initial_seed())
        examples, batches = TensorDataset(data.x, data.y), stream(seed, "batches")
        loader: Any = DataLoader(examples, batch_size=BATCH_SIZE, shuffle=not private, generator=batches)
        options = {"lr": method.lr, "generator": stream(seed, "theta"), **OPTIONS.get(method.name, {}), **options}
        learner = make(method.name, network, dataset_size=len(data), **options)
        widths = learner.posterior().std.values() if learner.variational else ()
        initial_std = max((float(width.max()) for width in widths), default=0.0)
        model: Any = learner.model
        optimizer: Any = learner.optimizer
        if private:
            # A fixed seed makes the noise reproducible, and so removable: right for a demonstration, wrong for secrets.
            model, optimizer, loader = learner.make_private_with_epsilon(
                engine,
                loader,
                target_epsilon=epsilon,
                target_delta=delta,
                epochs=epochs,
                max_grad_norm=MAX_GRAD_NORM,
                noise_generator=stream(seed, "noise"),
            )
            engine.check(nn.functional.cross_entropy)
        diagnostics, spent = Diagnostics(optimizer), math.inf
        for epoch in range(1, epochs + 1):
            for x, y in loader:
                optimizer.zero_grad()
                with learner.sample():
                    nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                diagnostics.observe(len(engine.accountant) if private else None)
            if private:
                spent = engine.get_epsilon(delta)
            on_epoch(epoch, epsilon=spent)
    sigma, steps = (optimizer.noise_multiplier, len(engine.accountant)) if private else (0.0, epochs * len(loader))
    return Run(method, learner, spent, sigma, steps, diagnostics, initial_std)


def on_features(digits: Digits, prior: str = PRIOR) -> tuple[nn.Linear, Split, Split]:
    """A last layer of zero, and the training and test digits as a prior's network sees them."""
    with one_thread():
        features = Features.of(SmallCNN(), prior, (1, 8, 8), input_mean=0.0, input_std=1.0)  # pixels are in [0, 1]
        train, test = (Split(features(part.x), part.y) for part in (digits.train, digits.test))
    return features.last_layer(10), train, test


def stream(seed: int, purpose: str) -> torch.Generator:
    """A generator of its own for each purpose, so that one method's θ-samples do not shift another's batches."""
    return torch.Generator().manual_seed(10 * seed + _PURPOSES.index(purpose))


def _claim(output: Path) -> Path:
    """Make the folder, or take one that is empty or was written by an earlier demonstration; refuse any other."""
    fix = "Pass another --output folder"
    try:
        if output.exists() and not output.is_dir():
            raise bad("output", str(output), "is a file", fix)
        if output.is_dir() and any(output.iterdir()) and not (output / MARKER).is_file():
            problem = "is not empty and was not written by the demo, so its files are left alone"
            raise bad("output", str(output), problem, fix)
        output.mkdir(parents=True, exist_ok=True)
        (output / MARKER).write_text("Written by `dpivon demo`, which may overwrite its own files here.\n")
    except OSError as error:
        raise bad("output", str(output), f"cannot be written ({error.strerror})", fix) from None
    return output


def _width_panels(posterior: Posterior, rows: Sequence[Row], initial: float) -> list[tuple[Panel, Axis, Axis]]:
    """Posterior standard deviation by layer, as a change since the start; curvature h and projected share over training."""
    layers = Diagnostics.by_layer(posterior)

    def change(width: float) -> float:
        return 100 * (width / initial - 1)

    widths = tuple(Point(change(s.median), i, change(s.p01), change(s.p99)) for i, s in enumerate(layers.values()))
    curvature = tuple(Point(r.step, r.hess.median, r.hess.p01, r.hess.p99) for r in rows)
    shares = Series("each step", tuple(Point(r.step, r.projected_share) for r in rows), ORANGE)
    line = tuple(Point(r.step, NOISE_ONLY) for r in (rows[0], rows[-1]))
    noise = Series(f"noise alone: {NOISE_ONLY:.1%}", line, GREY, dash="--")
    spread, step = "median, and 1% to 99%", Axis("step")
    first = f"Posterior std: median {change(rows[-1].std.median):+.2f}% since the start"
    second = f"Curvature: median {rows[0].hess.median:.4f} → {rows[-1].hess.median:.4f}"
    percent = Axis(f"change of the posterior std since the start ({initial:.4f}), in %")
    names = Axis("", names=tuple(name.removeprefix("features.").removeprefix("head.") for name in layers))
    return [
        (Panel(first, (Series(spread, widths, mark="ranges"),)), percent, names),
        (Panel(second, (Series(spread, curvature, GREEN),)), step, Axis("curvature h")),
        (Panel("Coordinates whose gradient is within the noise", (shares, noise)), step, Axis("projected share")),
    ]


def _introduce(
    console: Any, digits: Digits, methods: int, epsilon: float, delta: float, epochs: int, seed: int
) -> None:
    lines = {
        "Hardware": f"{cpu_name()}, one thread, torch {torch.__version__}. No GPU and no network are used.",
        "Data": f"scikit-learn's 8×8 scans: {len(digits.train)} to train on, {len(digits.validation)} that chose the learning "
        f"rates (DP-Steady's was set on CIFAR-10), {len(digits.test)} for the table below.",
        "Guarantee": f"ε ≤ {epsilon:g} at δ = {delta:g} for each private method by itself, against adding or removing one "
        f"training digit: {epochs} epochs of Poisson batches of {BATCH_SIZE} on average, C = {MAX_GRAD_NORM:g}, RDP "
        "accountant. It covers neither the choice of the learning rates nor the methods together.",
        "Seed": f"{seed}, for the privacy noise too, so that you get the same table again. Real secrets need noise "
        "whose seed is secret.",
    }
    if (epsilon, delta, epochs) != (EPSILON, DELTA, EPOCHS):
        chosen_at = f"ε = {EPSILON:g}, δ = {DELTA:g} and {EPOCHS} epochs"
        lines["Note"] = f"the learning rates were chosen at {chosen_at}; here others may be better."
    count = "one private method" if methods == 1 else f"{methods} private methods"
    console.print(f"[bold]dpivon {__version__} demo[/bold]: {count}, one small network.")
    print_facts(console, lines)


def _conclude(console: Any, results: Sequence[Result], runs: Sequence[Run]) -> None:
    from rich.table import Table

    n = results[0].test_examples
    table = Table(title=f"{n} test digits, seed {results[0].seed}", title_justify="left")
    for name in ("method", "prediction"):
        table.add_column(name)
    for name in ("ε", "accuracy ↑", "NLL ↓", "ECE ↓", "Brier ↓"):
        table.add_column(name, justify="right")
    for r in results:
        spent = "∞" if math.isinf(r.epsilon) else f"{r.epsilon:.3f}"
        table.add_row(
            r.method, r.prediction, spent, f"{r.accuracy:.1%}", *(f"{v:.3f}" for v in (r.nll, r.ece, r.brier))
        )
    console.print(table)
    best = max(r.accuracy for r in results)
    lines = {
        "How sure": f"one run on {n} digits: an accuracy near {best:.0%} has a standard error of about "
        f"{100 * math.sqrt(best * (1 - best) / n):.1f} points, so small differences mean nothing. ECE uses {BINS} bins.",
    }
    steady, begun = (
        next((r for r in results if r.method == title), None) for title in (describe("dp-steady").title, PRIOR_TITLE)
    )
    if steady and begun:
        lines["Prior"] = (
            f"a linear layer on what a network learned from made-up pen strokes, which are no one's data, "
            f"{_verb(steady.nll, begun.nll)} DP-Steady's NLL ({steady.nll:.3f} → {begun.nll:.3f}); "
            f"accuracy {steady.accuracy:.1%} → {begun.accuracy:.1%}."
        )
    if runs:
        run = runs[0]
        mean, averaged = (r for r in results if r.method == run.method.title)
        first, last = run.diagnostics.rows[0], run.diagnostics.rows[-1]
        lines |= {
            "Posterior": f"averaging IVON over {averaged.samples} samples {_verb(mean.nll, averaged.nll)} its NLL "
            f"({mean.nll:.3f} → {averaged.nll:.3f}) and {_verb(mean.ece, averaged.ece)} its ECE "
            f"({mean.ece:.3f} → {averaged.ece:.3f}).",
            "Curvature": f"IVON's median h went from {first.hess.median:.4f} to {last.hess.median:.4f} in {run.steps} "
            f"steps, and its median posterior std from {first.std.median:.4f} to {last.std.median:.4f}. The closer these "
            "pairs, the more the width is the choice of h₀ and the less it was learned.",
        }
    print_facts(console, lines)


def _verb(before: float, after: float) -> str:
    return "lowered" if after < before else "raised" if after > before else "did not change"
