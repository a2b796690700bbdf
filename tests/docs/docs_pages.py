"""The pages of the documentation, the README among them, and what is in them."""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

#: Every page by its path in the repository.
PAGES = {"README.md": ROOT / "README.md"} | {
    p.relative_to(ROOT).as_posix(): p for p in sorted(DOCS.rglob("*.md")) if "_site" not in p.parts
}

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.S | re.M)
_NOT_RUN = re.compile(r"<!-- not run: .+? -->\n+\Z", re.S)


def fences(text: str, *languages: str) -> list[str]:
    """Fenced blocks of these languages, in order. `<!-- not run: reason -->` before one leaves it out."""
    return [m[2] for m in _FENCE.finditer(text) if m[1] in languages and not _NOT_RUN.search(text[: m.start()])]


def without_fences(text: str) -> str:
    return _FENCE.sub("", text)


def inline_code(text: str) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without_fences(text))]


@contextmanager
def registries_as_they_were() -> Iterator[None]:
    """A page may add an estimator, a method or a layer rule; other tests run over the registries."""
    from dpivon.methods import METHODS
    from dpivon.optim.curvature import ESTIMATORS
    from dpivon.privacy.layers.registry import FORWARDS, RULES

    kept: list[tuple[dict[Any, Any], dict[Any, Any]]] = [
        (registry, copy.copy(registry)) for registry in (METHODS, ESTIMATORS, FORWARDS, RULES)
    ]
    try:
        yield
    finally:
        for registry, before in kept:
            registry.clear()
            registry.update(before)


def run(page: str, folder: os.PathLike[str] | str) -> dict[str, Any]:
    """The Python of a page, block after block in one namespace and an empty folder. What it defined."""
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    with chdir(folder), registries_as_they_were():
        for i, block in enumerate(fences(PAGES[page].read_text(), "python"), 1):
            exec(compile(block, f"{page}, block {i}", "exec", dont_inherit=True), names)
    return names


if __name__ == "__main__":  # python tests/docs/docs_pages.py docs/quickstart.md: one page, by hand
    import sys

    for name in sys.argv[1:]:
        run(name, tempfile.mkdtemp())
