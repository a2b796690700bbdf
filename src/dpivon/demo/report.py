"""What the demonstration says: the guarantee, live ε, the table, and what the numbers do and do not show."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dpivon._version import __version__
from dpivon.demo.data import Digits
from dpivon.demo.methods import DELTA, EPOCHS, EPSILON
from dpivon.demo.plots import BINS
from dpivon.demo.train import BATCH_SIZE, MAX_GRAD_NORM, Run
from dpivon.hardware import cpu_name


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


class Report:
    """Prints to the terminal, or nothing if ``quiet``."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console

        self.console = Console(quiet=quiet, highlight=False)
        self._variational: Run | None = None

    def introduce(self, digits: Digits, *, methods: int, epsilon: float, delta: float, epochs: int, seed: int) -> None:
        n = len(digits.train)
        lines = {
            "Hardware": f"{cpu_name()}, one thread, torch {torch.__version__}. No GPU and no network are used.",
            "Data": f"scikit-learn's 8×8 scans: {n} to train on, {len(digits.validation)} that chose the learning rates, "
            f"{len(digits.test)} for the table below.",
            "Guarantee": f"ε ≤ {epsilon:g} at δ = {delta:g} for each private method by itself, against adding or removing one "
            f"training digit: {epochs} epochs of Poisson batches of {BATCH_SIZE} on average, C = {MAX_GRAD_NORM:g}, RDP "
            "accountant. It covers neither the choice of the learning rates nor the methods together.",
            "Seed": f"{seed}, for the privacy noise too, so that you get the same table again. Real secrets need noise "
            "whose seed nobody knows.",
        }
        if (epsilon, delta, epochs) != (EPSILON, DELTA, EPOCHS):
            lines["Note"] = (
                f"the learning rates were chosen at ε = {EPSILON:g}, δ = {DELTA:g} and {EPOCHS} epochs; here others may "
                "be better."
            )
        self.console.print(f"[bold]dpivon {__version__} demo[/bold]: {_count(methods)}, one small network.")
        self._list(lines)

    @contextmanager
    def progress(self, name: str, epochs: int) -> Iterator[Callable[[int, float], None]]:
        """A bar with the live ε, as the function to call after every epoch."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description:<15}"),
            BarColumn(bar_width=24),
            TextColumn("epoch {task.completed:.0f}/{task.total:.0f}  ε = {task.fields[spent]:.3f}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, disable=self.console.quiet) as bar:
            task = bar.add_task(name, total=epochs, spent=0.0)
            yield lambda epoch, spent: bar.update(task, completed=epoch, spent=spent)

    def remember(self, run: Run) -> None:
        """The run whose posterior the conclusion talks about: the first of its kind."""
        self._variational = self._variational or run

    def conclude(self, results: Sequence[Result], folder: Path, written: Sequence[str], seconds: float) -> None:
        from rich.table import Table

        table = Table(title=f"{results[0].test_examples} test digits, seed {results[0].seed}", title_justify="left")
        for name in ("method", "prediction"):
            table.add_column(name)
        for name in ("ε", "accuracy ↑", "NLL ↓", "ECE ↓", "Brier ↓"):
            table.add_column(name, justify="right")
        for r in results:
            scores = (f"{r.accuracy:.1%}", f"{r.nll:.3f}", f"{r.ece:.3f}", f"{r.brier:.3f}")
            spent = "∞" if math.isinf(r.epsilon) else f"{r.epsilon:.3f}"
            table.add_row(r.method, r.prediction, spent, *scores)
        self.console.print(table)
        best = max(r.accuracy for r in results)
        error = math.sqrt(best * (1 - best) / results[0].test_examples)
        lines = {
            "How sure": f"one run on {results[0].test_examples} digits: an accuracy near {best:.0%} has a standard error "
            f"of about {100 * error:.1f} points, so small differences mean nothing. ECE uses {BINS} bins.",
        }
        lines |= self._about_posterior(results)
        self._list(lines)
        names = f"{', '.join(written[:-1])} and {written[-1]}"
        self.console.print(f"Wrote {names} to {folder}{os.sep} in {seconds:.0f} s.", soft_wrap=True, markup=False)

    def _about_posterior(self, results: Sequence[Result]) -> dict[str, str]:
        run = self._variational
        if run is None:
            return {}
        mean, averaged = (r for r in results if r.method == run.method.name)
        first, last = run.diagnostics.rows[0], run.diagnostics.rows[-1]
        return {
            "Posterior": f"averaging IVON over {averaged.samples} samples {_verb(mean.nll, averaged.nll)} its NLL "
            f"({mean.nll:.3f} → {averaged.nll:.3f}) and {_verb(mean.ece, averaged.ece)} its ECE "
            f"({mean.ece:.3f} → {averaged.ece:.3f}).",
            "Curvature": f"IVON's median h went from {first.hess.median:.4f} to {last.hess.median:.4f} in {run.steps} "
            f"steps, and its median posterior std from {first.std.median:.4f} to {last.std.median:.4f}. The closer these "
            "pairs, the more the width is the choice of h₀ and the less it was learned.",
        }

    def _list(self, lines: dict[str, str]) -> None:
        """Label and text in two columns, so that long text wraps under itself."""
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        for label, text in lines.items():
            grid.add_row(Text(label), Text(text))
        self.console.print(grid)


def _count(methods: int) -> str:
    return "one private method" if methods == 1 else f"{methods} private methods"


def _verb(before: float, after: float) -> str:
    return "lowered" if after < before else "raised" if after > before else "did not change"
