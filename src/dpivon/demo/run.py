"""The demonstration: train methods within one budget each, predict, compare, draw."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from torch import Tensor

from dpivon.demo.data import TRAIN, Split, load_digits
from dpivon.demo.methods import DELTA, EPOCHS, EPSILON, Entry, chosen
from dpivon.demo.output import claim
from dpivon.demo.plots import BINS, Panel, posterior_width, reliability_diagram
from dpivon.demo.report import Report, Result
from dpivon.demo.train import Run, stream, train
from dpivon.errors import bad, check_number, check_whole
from dpivon.metrics import accuracy, brier, ece, nll
from dpivon.threads import one_thread

SAMPLES = 32


def run_demo(
    output: str | os.PathLike[str],
    *,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    seed: int = 0,
    epochs: int = EPOCHS,
    methods: Sequence[str] = (),
    quiet: bool = False,
) -> list[Result]:
    """Train ``methods`` (DP-SGD, DP-Adam and DP-IVON-Gradsq unless told otherwise), each within (ε, δ), and compare them.

    Writes ``results.csv`` and ``reliability.png``, ``posterior.safetensors`` where there is a posterior, and
    ``posterior_width.png`` and ``diagnostics.csv`` about an IVON; where several methods write one of the last three, their
    names are appended. Returns the lines of the table. The same seed gives the same table on the same machine.
    """
    entries = chosen(methods)
    epsilon = check_number("epsilon", epsilon, "Use a budget such as 4", above=0.0)
    delta = check_number("delta", delta, "Use a value such as 1e-4", above=0.0)
    if delta >= 1 / TRAIN:
        problem = f"is not below 1/N = {1 / TRAIN:.3g}, so publishing one digit outright would be allowed"
        raise bad("delta", delta, problem, "Use a value such as 1e-4")
    epochs = check_whole("epochs", epochs, f"Use about {EPOCHS}", at_least=1)
    seed = check_whole("seed", seed, "Use a small number such as 0")
    if seed >= 2**32:
        raise bad("seed", seed, "must be less than 4294967296", "Use a small number such as 0")
    folder = claim(Path(output))
    began = time.perf_counter()
    report, digits = Report(quiet), load_digits()
    report.introduce(digits, methods=len(entries), epsilon=epsilon, delta=delta, epochs=epochs, seed=seed)

    results: list[Result] = []
    panels: list[Panel] = []
    several = sum(entry.samples > 0 for entry in entries) > 1
    written = ["results.csv", "reliability.png"]
    for method in entries:
        with one_thread(), report.progress(method.name, epochs) as on_epoch:
            run = train(method, digits.train, epsilon=epsilon, delta=delta, epochs=epochs, seed=seed, on_epoch=on_epoch)
        for prediction, samples in _ways_to_predict(method):
            probs = predict_with(run, digits.test, samples, seed)
            results.append(_score(run, prediction, samples, probs, digits.test, delta, seed))
            panels.append(Panel(f"{method.name}, {prediction}", probs))
        suffix = f"-{method.key}" if several else ""
        if method.samples:
            written.append(f"posterior{suffix}.safetensors")
            _save_posterior(run, folder / written[-1], delta, seed)
        if run.variational:
            written += [f"posterior_width{suffix}.png", f"diagnostics{suffix}.csv"]
            posterior_width(run.posterior, run.diagnostics.rows, folder / written[-2], initial_std=run.initial_std)
            run.diagnostics.to_csv(folder / written[-1])
            report.remember(run)
    reliability_diagram(panels, digits.test.y, folder / "reliability.png")
    _write_csv(results, folder / "results.csv")
    report.conclude(results, folder, written, time.perf_counter() - began)
    return results


def predict_with(run: Run, data: Split, samples: int, seed: int) -> Tensor:
    """Probabilities [n, 10], averaged over ``samples`` draws from the posterior, the same draws for the same seed."""
    with one_thread():
        return run.learner.predict(data.x, samples, generator=stream(seed, "prediction")).probs


def _ways_to_predict(method: Entry) -> list[tuple[str, int]]:
    if method.samples:
        return [("mean", 0), (f"{SAMPLES} samples", SAMPLES)]
    return [("point", 0)]


def _score(run: Run, prediction: str, samples: int, probs: Tensor, test: Split, delta: float, seed: int) -> Result:
    return Result(
        method=run.method.name,
        prediction=prediction,
        samples=samples,
        epsilon=run.epsilon,
        delta=delta,
        noise_multiplier=run.noise_multiplier,
        steps=run.steps,
        lr=run.method.lr,
        seed=seed,
        test_examples=len(test),
        accuracy=accuracy(probs, test.y),
        nll=nll(probs, test.y),
        ece=ece(probs, test.y, BINS),
        brier=brier(probs, test.y),
    )


def _save_posterior(run: Run, path: Path, delta: float, seed: int) -> None:
    guarantee = {"epsilon": f"{run.epsilon:.6g}", "delta": f"{delta:g}", "seed": str(seed), "data": "sklearn digits"}
    q = run.posterior
    replace(q, metadata=q.metadata | guarantee).save(path)


def _write_csv(results: Sequence[Result], path: Path) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=[f.name for f in fields(Result)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(result) for result in results)
