"""Objects named by an import path ``package.module:name``, as in study files and on the command line."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dpivon.errors import bad


def is_import_path(text: str) -> bool:
    """Whether ``text`` has the form ``package.module:name``."""
    module, _, name = text.partition(":")
    return name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def imported(argument: str, path: str, fix: str) -> Any:
    """The object at ``package.module:name``; modules of the working directory are found too.

    Importing runs the module's code: never call this with a path that came with a downloaded file.

    Raises:
        ArgumentError: names ``argument`` and ends in ``fix`` if there is no such object.
    """
    if not is_import_path(path):
        raise bad(argument, path, "is not an import path package.module:name", fix)
    module, _, name = path.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise bad(argument, path, f"could not be imported ({error})", fix) from error
    finally:
        sys.path.remove(here)


def called(argument: str, path: str, function: Callable[..., Any], fix: str, arguments: Mapping[str, Any]) -> Any:
    """What ``function``, named by ``path``, returns for arguments of which its signature is asked first."""
    if not callable(function):
        raise bad(argument, path, f"is a {type(function).__name__}, which cannot be called", fix)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise bad(argument, path, f"cannot be called with {', '.join(arguments)} ({error})", fix) from None
    return function(**arguments)
