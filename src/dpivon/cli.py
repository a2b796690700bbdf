"""The command line: train, predict, report, demo, methods, budget, audit, study, data, ledger, prior, export and version."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dpivon import ledger_commands
from dpivon._version import __version__
from dpivon.errors import DpivonError, bad
from dpivon.priors.commands import prior
from dpivon.privacy.accounting import ACCOUNTANTS, DEFAULT, tuning_costs
from dpivon.privacy.accounting import budget as plan
from dpivon.report.writer import report
from dpivon.study import commands
from dpivon.terminal import say, warnings_as_lines
from dpivon.train import commands as train_commands


class _Commands(TyperGroup):
    """Commands whose deliberate errors are one line, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DpivonError as error:
            say(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None
        except OSError as error:
            if error.filename is None:  # no file that a user named
                raise
            say(f"error: {error.filename}: {error.strerror}. Give a place that can be read and written.", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    help="Private Bayesian deep learning for PyTorch.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train_commands.train)
app.command()(train_commands.predict)
app.add_typer(commands.study, name="study")
app.add_typer(commands.data, name="data")
app.add_typer(ledger_commands.ledger, name="ledger")
app.add_typer(prior, name="prior")
app.command()(ledger_commands.export)
app.command()(report)


def main() -> None:
    """The entry point of ``dpivon`` and of ``python -m dpivon``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show ε shows ?, and the command still runs
    app(prog_name="dpivon")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dpivon {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def version() -> None:
    """Print the version.

    Example: dpivon version
    """
    _show_version(True)


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option(help="Folder for the results: new, empty, or written by an earlier demo.")
    ] = Path("demo-output"),
    epsilon: Annotated[float, typer.Option(help="The privacy budget ε of each method.")] = 4.0,
    delta: Annotated[float, typer.Option(help="Its δ; below 1/1297, one over the number of training digits.")] = 1e-4,
    epochs: Annotated[int, typer.Option(help="Passes over the training digits.")] = 40,
    method: Annotated[
        list[str] | None,
        typer.Option(help="A method to train, by its name in `dpivon methods`. Repeat it for several."),
    ] = None,
    prior: Annotated[
        bool,
        typer.Option("--prior", help="Add DP-Steady from first weights that were learned from made-up pen strokes."),
    ] = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same table on the same machine.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Write the files, print nothing.")] = False,
) -> None:
    """Compare DP-SGD, DP-Adam, DP-IVON and DP-Steady (or any methods) on real handwritten digits, in a minute, without GPU.

    Prints a table of accuracy, NLL, ECE and Brier score at the stated (ε, δ), and writes it with a reliability diagram,
    a figure of the posterior's width and the posterior itself.

    Example: dpivon demo --epsilon 8 --method dp-sgd --method dp-adambc --output my-demo
    """
    from dpivon.demo import run_demo

    given: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "seed": seed, "epochs": epochs}
    run_demo(output, **given, methods=method or (), prior=prior, quiet=quiet)


@app.command()
def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that is known of each as JSON.")] = False,
) -> None:
    """List the methods that `dpivon.method(name, model, …)` and `dpivon demo --method` know.

    Example: dpivon methods
    """
    from dpivon.methods import METHODS

    if as_json:
        described = [
            {key: value for key, value in vars(m).items() if key not in ("rule", "build", "predict", "defaults")}
            | {"defaults": {key: _json_number(value) for key, value in m.defaults.items()}}
            for m in METHODS.values()
        ]
        typer.echo(json.dumps(described, allow_nan=False, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "what it is", box=None, pad_edge=False)
    for m in METHODS.values():
        table.add_row(m.name, m.summary)
    Console(highlight=False).print(table)


@app.command()
def budget(
    dataset_size: Annotated[int, typer.Option(help="Number of training examples N.")],
    batch_size: Annotated[int, typer.Option(help="Expected batch size b; each example enters a batch with b/N.")],
    delta: Annotated[float, typer.Option(help="δ, well below 1/N.")],
    epochs: Annotated[int | None, typer.Option(help="Length of the run, in epochs of ⌈N/b⌉ steps …")] = None,
    steps: Annotated[int | None, typer.Option(help="… or in steps.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="σ, to learn what the run costs …")] = None,
    target_epsilon: Annotated[float | None, typer.Option(help="… or ε, to learn the σ it needs.")] = None,
    accountant: Annotated[str, typer.Option(help=f"One of {', '.join(ACCOUNTANTS)}.")] = DEFAULT,
    tuning: Annotated[
        float | None,
        typer.Option(help="Also: what choosing the best of about so many runs on the private data costs."),
    ] = None,
    tuning_law: Annotated[
        str | None, typer.Option(help="Law of the number of runs: geometric, logarithmic or poisson; by default each.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help='Print JSON. An infinite ε is the text "inf".')] = False,
) -> None:
    """What (ε, δ) a run will cost, or how much noise it needs, before it starts.

    Give one of --epochs and --steps, and one of --noise-multiplier and --target-epsilon. With --tuning the number of
    runs has to be random and to stay a secret, and nothing but the best run may be published: docs/threat-model.md.

    Example: dpivon budget --dataset-size 50000 --batch-size 512 --epochs 30 --delta 1e-5 --target-epsilon 3 --tuning 20
    """
    if tuning is None and tuning_law is not None:
        raise bad(
            "tuning-law", tuning_law, "was given without --tuning", "Give --tuning and the expected number of runs"
        )
    with warnings_as_lines():
        planned = plan(
            dataset_size=dataset_size,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            delta=delta,
            noise_multiplier=noise_multiplier,
            target_epsilon=target_epsilon,
            accountant=accountant,
        )
        costs = [] if tuning is None else tuning_costs(planned, tuning, tuning_law, target_epsilon=target_epsilon)
    if as_json:
        values: dict[str, Any] = {key: _json_number(value) for key, value in asdict(planned).items()}
        if costs:
            values["tuning"] = [{k: _json_number(v) for k, v in cost.as_dict().items()} for cost in costs]
        typer.echo(json.dumps(values, allow_nan=False))
    else:
        typer.echo("\n".join(map(str, [planned, *costs])))


@app.command()
def audit(
    out: Annotated[Path, typer.Option(help="Folder for the report: audit.html, audit.json, audit.png.")],
    method: Annotated[str, typer.Option(help="What trains, by its name in `dpivon methods`.")] = "dp-ivon-gradsq",
    model: Annotated[
        str, typer.Option(help="digits, small, or package.module:function that returns (model, inputs, labels).")
    ] = "digits",
    path: Annotated[
        list[str] | None,
        typer.Option(
            help="bookkeeping, alone (layers without a rule), distributed, stacked, captured or compiled; by default all."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One bound on ε a path instead of a curve.")] = False,
) -> None:
    """Look for signs that training is less private than it says. Exits 1 if there are any.

    Neighbouring data sets, statistics of noise and batches, and attacks with canaries; run it on public or made-up data.

    Example: dpivon audit --method dp-sgd --path alone --quick --out audit-output
    """
    from dpivon.audit.run import audit_paths

    if not audit_paths(out, model=model, method=method, paths=path or [], quick=quick, say=typer.echo):
        raise typer.Exit(1)


def _json_number(value: Any) -> Any:
    """JSON has no infinity."""
    return "inf" if isinstance(value, float) and math.isinf(value) else value
