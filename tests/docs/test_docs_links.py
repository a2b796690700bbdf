"""Every link, anchor and picture of every page leads somewhere, and every path and name that a page mentions exists."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from docs_pages import DOCS, PAGES, ROOT, inline_code, without_fences

LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = (ROOT, ROOT / "src" / "dpivon", DOCS, ROOT / "tests")
MADE_BY_RUNNING = ("run/", "demo-output/", "study-output/", "audit-output/", "site/")


def anchors(page: Path) -> set[str]:
    """The anchors that mkdocs gives to the headings of a page."""
    toc = pytest.importorskip("markdown.extensions.toc", reason="pip install 'dpivon[docs]'")
    slugs: set[str] = set()
    for line in without_fences(page.read_text()).splitlines():
        if line.startswith("#"):
            toc.unique(toc.slugify(re.sub(r"[`*]", "", line.lstrip("#").strip()), "-"), slugs)
    return slugs


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_lead_to_files_and_headings_that_exist(page: str) -> None:
    here = PAGES[page]
    for link in LINK.findall(without_fences(here.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (here.parent / path).resolve() if path else here
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_a_page_mentions_exist(page: str) -> None:
    for code in inline_code(PAGES[page].read_text()):
        if re.fullmatch(r"[\w-]+(/[\w.-]+)*/[\w.-]+\.(py|md|yaml|json|toml|txt|csv|png)", code) and not code.startswith(
            MADE_BY_RUNNING
        ):
            assert any((folder / code).exists() for folder in FOLDERS), code


def resolve(name: str) -> Any:
    """The object of a dotted name; a field of a dataclass counts as its attribute."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if dataclasses.is_dataclass(found) and part in {field.name for field in dataclasses.fields(found)}:
            return found
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[:i]))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_names_that_a_page_mentions_exist(page: str) -> None:
    for code in inline_code(PAGES[page].read_text()):
        name = re.match(r"dpivon(\.\w+)+", code)
        if name is not None:
            resolve(name[0])


def test_a_name_that_does_not_exist_is_seen() -> None:
    with pytest.raises(ModuleNotFoundError):
        resolve("dpivon.optim.ivon_rule.IVONState.variance")
