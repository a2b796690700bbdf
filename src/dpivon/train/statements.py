"""What was assumed to be public, and what was not read off the data: sentences for output, summary and report."""

from __future__ import annotations

from dpivon.train.config import Config
from dpivon.train.published import Description
from dpivon.train.sources.arrays import Arrays
from dpivon.train.sources.images import Images


def public_inputs(config: Config, description: Description) -> list[str]:
    """Facts that the guarantee does not protect, because they were declared."""
    source = description.inputs
    said = [
        f"The number of examples N = {config.dataset_size}, as declared; the rows were not counted for it.",
        f"The classes {', '.join(config.classes)}.",
        f"Expected batch {config.batch_size}, {config.epochs} epochs, step size {config.lr:g}, clip bound "
        f"{config.max_grad_norm:g}, method {config.method}, network {description.network.told()}.",
    ]
    if isinstance(source, Images):
        said.append(f"Every example is {source.told()}.")
    elif isinstance(source, Arrays):
        said.append(f"Every example is {source.told()}, of values from {source.bounds.told()}.")
    else:
        columns = "; ".join(f"{name}: {column.told()}" for name, column in source.columns.items())
        said.append(f"The names of the columns and what they may hold: {columns}.")
    if config.source:
        said.append(f"Where these ranges and categories come from, in the words of who declared them: {config.source}")
    return said


def choices_not_made(description: Description) -> list[str]:
    """Choices that usual pipelines make by looking at the rows, without noise."""
    source = description.inputs
    if isinstance(source, Images):
        own = [
            "No mean image and no channel statistics: bytes 0 to 255 are mapped to −1 to 1.",
            "No size was read off the images: each was resized to the declared one.",
        ]
    else:
        own = [
            "No mean, deviation or quantile of a column: values are clamped to the declared range and mapped to −1 to 1.",
            "No imputation from the data: a missing value is the middle of its range"
            + (", with an indicator of its own." if len(source.shape) == 1 else "."),
        ]
        if not isinstance(source, Arrays):
            own.append("No list of the values that occur: an undeclared category goes to one slot for all others.")
    return [
        *own,
        "No class weights and no resampling by class: how frequent a class is stays private.",
        "No early stopping and no choice among models by held-out or test results.",
        "Network, batch, epochs and step size were given, or follow from declared numbers. If you chose them by trying runs on "
        "this data, ε does not cover that choice: see `dpivon budget --tuning`.",
    ]
