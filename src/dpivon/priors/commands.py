"""``dpivon prior``: learn a prior from no one's data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpivon.models.networks import network as network_by_name
from dpivon.priors.learning import learn as learn_prior

prior = typer.Typer(help="Priors that no one's data is in.", no_args_is_help=True)


@prior.callback()
def _group() -> None:
    pass


@prior.command()
def learn(
    out: Annotated[Path, typer.Option(help="The prior's file, for `prior=`; the same command goes on from it.")],
    network: Annotated[str, typer.Option(help="A network by name, or package.module:factory.")] = "paper",
    process: Annotated[
        str, typer.Option(help="The random process, such as filters, leaves or generators.")
    ] = "filters",
    seconds: Annotated[float, typer.Option(help="How long, over all calls.")] = 300.0,
    steps: Annotated[int, typer.Option(help="The same in steps; the earlier end counts.")] = 200_000,
    channels: Annotated[int, typer.Option(help="Of the images.")] = 3,
    side: Annotated[int, typer.Option(help="Of the images, in pixels.")] = 32,
    classes: Annotated[int, typer.Option(help="Of the network's last layer, which stays at zero.")] = 10,
    batch: Annotated[int, typer.Option(help="Images per step, of two views each.")] = 1024,
    pool: Annotated[int, typer.Option(help="Images that are kept at a time.")] = 262_144,
    seed: Annotated[int, typer.Option(help="Of weights and images.")] = 0,
) -> None:
    """Learn a prior for a network from images of a random process, which costs no privacy.

    Example: dpivon prior learn --network wrn-16-4 --process generators --seconds 600 --out prior.safetensors
    """
    import torch

    torch.manual_seed(seed)
    made = network_by_name(network, shape=(channels, side, side), classes=classes)
    few: dict[str, Any] = {"fresh": min(2048, pool // 4), "pool": pool, "batch": batch, "steps": steps, "seed": seed}
    learn_prior(made, out, process=process, seconds=seconds, shape=(channels, side), **few)
