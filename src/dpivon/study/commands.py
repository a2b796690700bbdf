"""``dpivon study`` and ``dpivon data``: what people type."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpivon.terminal import say

study = typer.Typer(help="Grids of private runs: declared, run, continued and drawn.", no_args_is_help=True)
data = typer.Typer(help="Data sets.", no_args_is_help=True)

_Out = Annotated[Path, typer.Argument(help="Folder of results.")]
_Lr = Annotated[Path | None, typer.Option(help="Learning rates that `dpivon study pick` chose.")]
_Data = Annotated[Path, typer.Option("--data", envvar="DPIVON_DATA", help="Folder that holds the data set.")]


@study.command()
def resolve(
    study: Annotated[Path, typer.Argument(help="A study, such as examples/study.yaml.")],
    to: Annotated[Path, typer.Argument(help="Where to write the plan (.json).")],
    lr: _Lr = None,
) -> None:
    """Write a study as a plan: every run by its numbers, readable on a machine without YAML.

    Example: dpivon study resolve examples/study.yaml plan.json
    """
    from dpivon.study.plan import config

    plan = config.resolve(study, lr)
    plan.write(to)
    say(f"{len(plan.runs)} runs of {plan.epochs} epochs in {to}")


@study.command()
def run(
    study: Annotated[Path, typer.Argument(help="A study (.yaml) or a plan (.json).")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of results; a study that was stopped goes on in it.", show_default="study-output/NAME"
        ),
    ] = None,
    data: _Data = Path("data"),
    lr: _Lr = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default what there is.")] = None,
    stack: Annotated[int | None, typer.Option(help="Runs to train at once: 90 on a GPU, 1 on a CPU.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32, or bfloat16 as on a GPU by default.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop at a checkpoint after so long.")] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="How much work a crash may lose.")] = 60.0,
    block: Annotated[int, typer.Option(help="Steps to draw and charge at once.")] = 32,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the posterior of every run.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    only: Annotated[str, typer.Option(help="Run only what has this in its id, such as b512-.")] = "",
    engine: Annotated[
        str, typer.Option(help="local: in this process. ray: on a Ray cluster (dpivon\\[ray]).")
    ] = "local",
    address: Annotated[
        str | None, typer.Option(help="Ray: the cluster's; without it one is started on this machine.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Ray: stacks at once; by default what the cluster holds.")] = None,
    gpus_per_stack: Annotated[float | None, typer.Option(help="Ray: the share of a GPU that a stack takes: 1.")] = None,
    retries: Annotated[int | None, typer.Option(help="Ray: new attempts at a stack that fails: 3.")] = None,
    hung_after: Annotated[
        float | None, typer.Option(help="Ray: seconds of silence after which a worker is ended: 1800.")
    ] = None,
    scratch: Annotated[
        Path | None, typer.Option(help="Ray: folder on the workers' own disks, where they do not see --out.")
    ] = None,
) -> None:
    """Run what is not finished yet. Stop it at any time; the same command goes on.

    Example: dpivon study run --engine ray examples/study.yaml --out study-output/quick
    """
    from dpivon.study.plan import config
    from dpivon.study.plan.plan import read_plan
    from dpivon.study.run.runner import run_with
    from dpivon.study.run.settings import Cluster, Settings

    plan = read_plan(study) if study.suffix == ".json" else config.resolve(study, lr)
    settings = Settings(data, device, stack, precision, minutes, checkpoint_seconds, block, keep, quiet, only)
    out = out or Path("study-output") / plan.name
    cluster = Cluster(address, workers, gpus_per_stack, retries, hung_after, scratch)
    outcome = run_with(engine, plan, out, settings, cluster)
    for line in outcome.lines(out / plan.table):
        say(line)
    raise typer.Exit(outcome.exit_code)


@study.command()
def status(out: _Out) -> None:
    """What is finished and what is under way.

    Example: dpivon study status study-output/quick
    """
    from dpivon.study.results.folder import status_lines

    for line in status_lines(out):
        say(line)


@study.command()
def merge(
    out: _Out,
    others: Annotated[list[Path], typer.Argument(help="Folders of the same plan, from other machines.")],
) -> None:
    """Bring the finished runs of other machines together in one folder.

    Example: dpivon study merge study-output/quick from-machine-1 from-machine-2
    """
    from dpivon.study.results.folder import merge as together

    for folder, new in together(out, others).items():
        say(f"{new} new runs from {folder}")


@study.command()
def report(
    out: _Out,
    tuning: Annotated[
        Path | None, typer.Option(help="Results of the tuning study.", show_default="OUT-tuning, if it is there")
    ] = None,
    mixed_code: Annotated[bool, typer.Option("--mixed-code", help="Compare rows of different code too.")] = False,
) -> None:
    """Rebuild everything that follows from the tables: ε by PLD, the summary, the figures, the learning rates.

    Example: dpivon study report study-output/quick
    """
    from dpivon.study.results.summary import write_report

    for path in write_report(out, tuning, mixed_code=mixed_code):
        say(path)


@study.command()
def pick(
    out: Annotated[Path, typer.Argument(help="Results of a tuning study.")],
    to: Annotated[Path, typer.Option(help="Where to write the chosen learning rates.")] = Path("lr.json"),
    by_cell: Annotated[bool, typer.Option("--by-cell", help="A rate for each b, σ and C, not one for all.")] = False,
) -> None:
    """Choose each method's learning rate by its validation accuracy.

    Example: dpivon study pick study-output/tuning
    """
    from dpivon.study.results.tuning import pick as choose

    for method, found in choose(out, to, by_cell=by_cell).items():
        words = ", ".join(f"{c.lr:g} ({c.accuracy:.3f})" for c in found)
        say(f"{method}: {found[0].lr:g}, of {words}")
    say(f"written to {to}; use it with `dpivon study run STUDY --lr {to}`")


@data.command()
def fetch(
    name: Annotated[str, typer.Argument(help="cifar10, cifar10-python or fashion-mnist.")],
    to: Annotated[Path, typer.Option(help="Folder to put it into.")] = Path("data"),
) -> None:
    """Download a data set from its official address and check it.

    Example: dpivon data fetch cifar10
    """
    from dpivon.data.fetch import fetch as download

    found = download(name, to, say)
    words = "as published" if found.verified else "whole, by its shape"
    say(f"{len(found.train)} training and {len(found.test)} test images, {words}")
