"""YAML that people write, checked against a pydantic model; what is wrong with it is one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from dpivon.errors import ArgumentError, bad

MOST_CHARACTERS = 1_000_000
_Model = TypeVar("_Model", bound=BaseModel)


def read_yaml(name: str, path: Path, *, missing: str, fix: str) -> Any:
    """What the file holds. ``name`` is the argument it was given as, ``missing`` the fix if it is not there."""
    import yaml

    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise bad(name, str(path), "does not exist", missing) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise bad(name, str(path), f"is not YAML ({' '.join(str(error).split())})", fix) from None


def parse_yaml(text: str) -> Any:
    """What the text says, in time that grows with its length alone.

    Aliases are refused: nine lines of them can stand for a billion values. So are numbers of more than 400 characters, and a
    text of more than a million.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()
                raise yaml.YAMLError(f"*{event.anchor} is an alias, which is not read; write its value out")
            return super().compose_node(parent, index)

        def construct_scalar(self, node: Any) -> Any:
            if node.tag.endswith((":int", ":float")) and len(node.value) > 400:  # 1:1:1:… takes quadratic time
                raise yaml.YAMLError(f"{node.value[:20]}… is a number of {len(node.value):,} characters")
            return super().construct_scalar(node)

    if len(text) > MOST_CHARACTERS:
        raise yaml.YAMLError(f"it has {len(text):,} characters, more than {MOST_CHARACTERS:,}")
    return yaml.load(text, Loader)


def validated(model: type[_Model], raw: Any, name: str, *, fix: str, place: str = "") -> _Model:
    """``raw`` as a ``model``, or an error about the first thing that is wrong in it; ``place`` says where it was written."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where, given = _place(first["loc"], raw)
        problem = first["msg"].removeprefix("Value error, ")
        if not where and problem.partition(":")[0] in model.model_fields:  # a rule about several fields names one first
            where, _, problem = problem.partition(": ")
            given = raw.get(where) if isinstance(raw, dict) else None
        problem = problem[0].lower() + problem[1:]
        if error.error_count() > 1:
            problem += f" (and {error.error_count() - 1} more{f' in {place}' if place else ''})"
        elif place:
            problem += f" (in {place})"
        if isinstance(given, dict | BaseModel):  # a whole configuration says nothing
            raise ArgumentError(f"{where or name}: {problem}. {fix}.") from None
        raise bad(where or name, given, problem, fix) from None


def _place(loc: tuple[int | str, ...], raw: Any) -> tuple[str, Any]:
    """Where in ``raw`` something is wrong, by the names that are written there, and what is written."""
    names, value = [], raw
    for i, part in enumerate(loc):
        try:
            value = value[part]
        except TypeError:
            continue  # pydantic's name of an alternative
        except (KeyError, IndexError):
            if i + 1 < len(loc):
                continue  # the same
            value = None
        names.append(str(part))
    return ".".join(names), value
