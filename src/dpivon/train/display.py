"""What `dpivon train` shows: the plan, a bar with live ε, and at the end what was spent, assumed and not chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from dpivon.report.privacy import shown
from dpivon.terminal import Bar, print_facts, printable
from dpivon.train.artefacts import Line
from dpivon.train.config import Config
from dpivon.train.loop import Loop
from dpivon.train.published import Description
from dpivon.train.run import Show, Watcher

NOT_PRIVATE = "not private"
LONGEST = 400  # characters of a sentence on the terminal


class Display(Watcher):
    """Progress goes to stderr, so that stdout is the answer alone."""

    def __init__(self, quiet: bool) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self._bar: Bar | None = None

    def begin(self, config: Config, description: Description, loop: Loop) -> Show:
        units = "people" if config.unit else "examples"
        what = f"{len(config.classes)} classes" if config.classes else "one number to predict"
        what = f"{len(config.labels)} labels" if config.labels else what
        plan = (
            f"{config.method} on {description.trained}; {description.inputs.describe()}, "
            f"{what}. "
            f"{loop.steps} steps of {config.expected_batch} {units} on average, σ = {loop.optimizer.noise_multiplier:.4g} for "
            f"ε ≤ {config.epsilon:g} at δ = {config.delta:g}"
        )
        if (earlier := loop.earlier) is not None:
            plan += f", together with run {earlier.run}, which had spent ε = {shown(earlier.spent(config))}"
        plan += "."
        self.console.print(Text(printable(plan)))
        bar = self._bar = Bar(loop.steps, lambda: loop.epsilon, not self.console.quiet, self.console)
        bar.__enter__()

        def show(line: Line | None, step: int) -> None:
            known: dict[str, Any] = {}
            if line is not None:
                nll = line.heldout_nll
                note = {} if nll is None else {"note": f"  held-out loss {nll:.3f} ({NOT_PRIVATE})"}
                known = {"epsilon": line.epsilon, **note}
            bar.at(step, **known)

        return show

    def end(self) -> None:
        if self._bar is not None:
            self._bar.__exit__()

    def say(self, text: str) -> None:
        self.console.print(Text(printable(text)))


def conclude(summary: dict[str, Any], folder: Path, console: Console) -> None:
    """The summary in words."""
    print_facts(console, _lines(summary))
    console.print(
        Text(
            f"{folder} holds the state of the noise and is as secret as the data. Next: dpivon predict {folder} NEW_DATA --out "
            f"predictions.csv; dpivon export {folder} --out published, which may be published."
        )
    )


def _lines(summary: dict[str, Any]) -> dict[str, str | list[str]]:
    by = ", ".join(f"{name} {value:.4g}" for name, value in summary["epsilon_by_accountant"].items())
    whom = f"person with all their rows (by {summary['unit']})" if summary.get("unit") else "example"
    lines: dict[str, str | list[str]] = {
        "Guarantee": f"ε = {summary['epsilon']:.4g} at δ = {summary['delta']:g}, against adding or removing one {whom}, "
        f"for the published model of {summary['releases']} releases (by accountant: {by}). "
        "Another run on the same data costs its own ε on top.",
    }
    if started := summary.get("started_from"):
        lines["Started from"] = started["sentence"]
    if "path" in summary:
        lines["Steps"] = f"were {summary['path']}."
    if not summary["seed_is_secret"]:
        lines["Seed"] = "was given, and decides the noise: whoever knows it can take the noise away."
    if (scores := summary["metrics"]) is not None:
        calibrated = f", ECE {scores['mc_ece']:.3f}" if "mc_ece" in scores else ""
        lines["Test data"] = [
            *summary.get("findings", ()),
            f"NLL {scores['mc_nll']:.3f}{calibrated}; all averaged over the "
            f"posterior. These scores are {NOT_PRIVATE.upper()}: no noise was added to them.",
        ]
        if warnings := summary.get("warnings"):
            lines["Warning"] = warnings
    lines["Public"] = [_short(sentence) for sentence in summary["public_inputs"]]
    lines["Not chosen"] = summary["choices_not_made"]
    return lines


def _short(sentence: str) -> str:
    """A table may have a hundred columns."""
    return sentence if len(sentence) <= LONGEST else f"{sentence[:LONGEST]}… (all of it is in summary.json)"
