"""From a configuration to the public description of inputs and classes that training and prediction share."""

from __future__ import annotations

from pathlib import Path

from dpivon.errors import bad
from dpivon.train.columns import Column
from dpivon.train.config import Config
from dpivon.train.sources import kind_of
from dpivon.train.sources.arrays import Arrays, example_shape
from dpivon.train.sources.images import Images
from dpivon.train.sources.table import Table, column_names

AnySource = Table | Images | Arrays


def source_of(config: Config) -> AnySource:
    """How to read and encode the data: from what was declared, and the names of columns or the shape of an array."""
    kind = kind_of(config.data)
    if kind == "image":
        _refuse(config, "columns", "value_bounds", "target")
        return Images(size=config.image_size, channels=config.channels)
    if kind == "array":
        _refuse(config, "columns", "target", "ignore")
        if config.value_bounds is None:
            problem = "the range of the values is private unless you state it, and nothing is read off the data"
            raise bad("bounds", None, problem, "State it, such as --bounds 0:255")
        return Arrays(sizes=example_shape(config.data), bounds=config.value_bounds)
    return Table(columns=_columns(config), target=_target(config), delimiter=config.delimiter)


def _refuse(config: Config, *names: str) -> None:
    for name in names:
        if value := getattr(config, name):
            kind = "images" if Path(config.data).is_dir() else "arrays"
            raise bad(name, value, f"has no meaning for {kind}", "Leave it out")


def _target(config: Config) -> str:
    names = column_names(Path(config.data), config.delimiter)
    if config.target is None:
        raise bad("target", None, "is needed", f"Name the column to predict, one of {', '.join(names)}")
    if config.target not in names:
        raise bad("target", config.target, "is no column of the table", f"Name one of {', '.join(names)}")
    return config.target


def _columns(config: Config) -> dict[str, Column]:
    """The declared columns in their order; then, if a range was stated for all others, those in the header's."""
    target, names = _target(config), column_names(Path(config.data), config.delimiter)
    for name in [*config.columns, *config.ignore]:
        if name not in names:
            raise bad("columns", name, "is no column of the table", f"Name one of {', '.join(names)}")
    columns = {name: column for name, column in config.columns.items() if name not in (target, *config.ignore)}
    others = [name for name in names if name not in (target, *columns, *config.ignore)]
    if others and config.value_bounds is None:
        raise bad(
            "columns",
            ", ".join(others),
            "neither range nor categories are declared, and nothing is read off the data",
            f"State --bounds {others[0]}:LOW:HIGH or --categories {others[0]}:A,B, use --schema, or --ignore {others[0]}",
        )
    if config.value_bounds is not None:
        columns |= dict.fromkeys(others, config.value_bounds)
    if not columns:
        raise bad("columns", "none", "there is nothing to learn from", "Declare at least one column besides the target")
    return columns
