"""What methods did where a plan says nothing. A default may change from one version to the next, and with it what a run's id
means; so what its results were made with is kept beside them, and results of two kinds never meet in one folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dpivon.durable.files import replace as whole
from dpivon.errors import bad
from dpivon.methods import METHODS
from dpivon.study.plan import Plan

DEFAULTS = "defaults.json"
_FIX = "Go on with the version that it was begun with, or name the option in the study and give another folder"

Defaults = dict[str, dict[str, Any]]


def defaults_of(plan: Plan) -> Defaults:
    """By method, every option that one of its runs leaves out."""
    found: Defaults = {}
    for run in plan.runs:
        method = METHODS[run.method]
        values = {**method.defaults, "trace": method.trace, "averages": method.averages}
        found.setdefault(run.method, {}).update({k: v for k, v in values.items() if k not in run.options})
    return found


def keep_defaults(out: Path, plan: Plan) -> None:
    whole(out / DEFAULTS, (json.dumps(defaults_of(plan), indent=1, sort_keys=True) + "\n").encode())


def check_defaults(out: Path, plan: Plan) -> None:
    """That the runs that are there, ``plan``, would be made the same way today."""
    _same(read_defaults(out), json.loads(json.dumps(defaults_of(plan))), "out", str(out), "are")


def check_alike(folder: Path, first: Path) -> None:
    """That two parts of a plan were made the same way."""
    _same(read_defaults(folder), read_defaults(first), "others", str(folder), f"in {first} are")


def read_defaults(out: Path) -> Defaults:
    """Of results that are older than this file nothing is known."""
    path = out / DEFAULTS
    if not path.exists():
        return {}
    try:
        found: Defaults = json.loads(path.read_text(encoding="utf-8"))
        return {str(method): dict(options) for method, options in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        problem = f"is not a table of options by method ({type(error).__name__})"
        raise bad("out", str(path), problem, "Restore it, or give another folder") from None


def _same(then: Defaults, now: Defaults, argument: str, folder: str, words: str) -> None:
    for method in then.keys() & now.keys():
        for option in sorted(then[method].keys() & now[method].keys()):
            was, is_now = then[method][option], now[method][option]
            if was != is_now:
                problem = (
                    f"holds results of {method} with {option} = {was!r} where a study says nothing; others {words} made "
                    f"with {is_now!r}"
                )
                raise bad(argument, folder, problem, _FIX)
