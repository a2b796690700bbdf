"""What goes wrong, in the caller's words: every message names the argument, its value and the fix."""

from __future__ import annotations

import importlib
import math
import re
from typing import Any


class DpivonError(Exception):
    """Any error that dpivon raises on purpose."""


class ArgumentError(DpivonError, ValueError):
    """An argument that cannot be used as given."""


class PrivacyError(DpivonError, ValueError):
    """Going on would have weakened the guarantee. Nothing was released."""


class BudgetSpent(PrivacyError):
    """The next release would pass the budget, so it was not made. What was released before it is within the budget."""


class StorageError(DpivonError, OSError):
    """Something could not be written. What was on disk before is intact."""


class RankError(DpivonError, RuntimeError):
    """Another process of the group is gone, failed, or does not answer. Nothing was released without a charge."""


class MissingPackage(DpivonError, ImportError):
    """A package that an extra of dpivon brings is not installed."""


class PrivacyWarning(UserWarning):
    """Training runs, but not under the guarantee the caller may expect."""


def bad(name: str, value: Any, problem: str, fix: str) -> ArgumentError:
    """The one shape of an argument error: ``name=value: problem. fix.``"""
    return ArgumentError(f"{name}={_short(repr(value))}: {_short(problem, 500)}. {fix}.")


def _short(text: str, most: int = 200) -> str:
    """In one line, and not a whole tensor or file of it."""
    line = re.sub(r"\s*[\n\r]\s*", " ", text).rstrip(".")
    return line if len(line) <= most else f"{line[: most - 1]}…"


def check_number(
    name: str,
    value: Any,
    fix: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    finite: bool = True,
) -> float:
    """``value`` as a float inside the stated bounds, or an :class:`ArgumentError` that ends in ``fix``."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # the third from a tensor of several elements
        raise bad(name, value, "is not a number", fix) from None
    if math.isnan(number):
        raise bad(name, value, "is not a number", fix)
    if finite and math.isinf(number):
        raise bad(name, value, "must be finite", fix)
    if above is not None and not number > above:
        raise bad(name, value, f"must be greater than {above:g}", fix)
    if at_least is not None and not number >= at_least:
        raise bad(name, value, f"must be at least {at_least:g}", fix)
    if below is not None and not number < below:
        raise bad(name, value, f"must be less than {below:g}", fix)
    if at_most is not None and not number <= at_most:
        raise bad(name, value, f"must be at most {at_most:g}", fix)
    return number


def check_whole(name: str, value: Any, fix: str, *, at_least: int = 0) -> int:
    """``value`` as an int, or an :class:`ArgumentError`: fractions are never rounded silently."""
    number = check_number(name, value, fix, at_least=at_least, at_most=2.0**64)
    if number != int(number):
        raise bad(name, value, "must be a whole number", fix)
    return value if type(value) is int else int(number)  # a float would round one above 2⁵³


def check_choice(name: str, value: Any, choices: tuple[str, ...], fix: str) -> str:
    if value not in choices:
        raise bad(name, value, f"is not one of {', '.join(map(repr, choices))}", fix)
    return str(value)


def pip_line(extra: str) -> str:
    """The command that installs an extra of dpivon."""
    return f"pip install 'dpivon[{extra}]'"


def need(package: str, extra: str) -> Any:
    """The imported package, or an error with the line that installs it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        problem = f"{package}: is not installed ({error}). {pip_line(extra)} installs what is needed."
        raise MissingPackage(problem) from error
