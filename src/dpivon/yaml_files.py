"""YAML that people write, checked against a pydantic model; what is wrong with it is one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from dpivon.errors import bad

_Model = TypeVar("_Model", bound=BaseModel)


def read_yaml(name: str, path: Path, *, missing: str, fix: str) -> Any:
    """What the file holds. ``name`` is the argument it was given as, ``missing`` the fix if it is not there."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise bad(name, str(path), "does not exist", missing) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise bad(name, str(path), f"is not YAML ({' '.join(str(error).split())})", fix) from None


def validated(model: type[_Model], raw: Any, name: str, *, fix: str, place: str = "") -> _Model:
    """``raw`` as a ``model``, or an error about the first thing that is wrong in it; ``place`` says where it was written."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or name
        problem = first["msg"].removeprefix("Value error, ")
        problem = problem[0].lower() + problem[1:]
        if error.error_count() > 1:
            problem += f" (and {error.error_count() - 1} more{f' in {place}' if place else ''})"
        elif place:
            problem += f" (in {place})"
        given = None if first["type"] == "missing" else first["input"]
        raise bad(where, given, problem, fix) from None
