"""A missing package, in the caller's words."""

from __future__ import annotations

import importlib
from typing import Any

from dpivon.errors import DpivonError


class MissingPackage(DpivonError, ImportError):
    """A package that an extra of dpivon brings is not installed."""


def pip_line(extra: str) -> str:
    return f"pip install 'dpivon[{extra}]'"


def need(package: str, extra: str) -> Any:
    """The imported package, or an error with the line that installs it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"{package}: is not installed ({error}). {pip_line(extra)} installs what is needed."
        ) from error
