"""The site builds without a warning, points nowhere outside itself, and has every public name."""

from __future__ import annotations

import inspect
import os
import pkgutil
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from docs_pages import PAGES, ROOT, without_fences

import dpivon

pytest.importorskip("mkdocstrings", reason="pip install 'dpivon[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr, built.stderr
    return out


class Page(HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {key: value or "" for key, value in attrs}
        self.anchors |= {said[key] for key in ("id", "name") if key in said}
        if tag == "a" and "href" in said:
            self.links.append(said["href"])
        if tag in ("img", "script", "iframe", "source") and "src" in said:
            self.loads.append(said["src"])
        if tag == "link" and said.get("rel") != "canonical" and "href" in said:
            self.loads.append(said["href"])


@pytest.mark.slow
def test_every_link_of_the_built_site_leads_to_a_page_and_an_anchor_and_nothing_is_loaded_from_elsewhere(
    site: Path,
) -> None:
    pages = {p: Page(p.read_text()) for p in site.rglob("*.html") if p.name != "404.html"}
    assert len(pages) > 25
    for path, page in pages.items():
        for link in page.loads:
            assert not urlsplit(link).netloc, (path, link)
            assert link.startswith("data:") or (path.parent / unquote(urlsplit(link).path)).exists(), (path, link)
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path not in ("", ".") else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), (path.name, link)
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, (path.name, link)


def inventory(site: Path) -> set[str]:
    """The names that the reference documents."""
    raw = (site / "objects.inv").read_bytes()
    body = zlib.decompress(raw.split(b"\n", 4)[4]).decode()
    return {line.split(" ", 1)[0] for line in body.splitlines()}


def public() -> list[tuple[str, str]]:
    """Every public name of the library and of its packages, with the place where it is defined."""
    packages = ["dpivon"] + [
        m.name for m in pkgutil.walk_packages(dpivon.__path__, "dpivon.") if m.ispkg and "kernels" not in m.name
    ]
    names = []
    for package in packages:
        module = import_module(package)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if not inspect.ismodule(value) and name != "__version__":
                home = getattr(value, "__module__", package)
                names.append((f"{package}.{name}", f"{home}.{getattr(value, '__qualname__', name)}"))
    return names


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    documented = inventory(site)
    missing = [name for name, home in public() if name not in documented and home not in documented]
    assert not missing, missing
    overview = without_fences(PAGES["docs/reference/index.md"].read_text())
    assert [n for n in dpivon.__all__ if n != "__version__" and f"[`{n}`]" not in overview] == []


@pytest.mark.parametrize("name", [n for n in dpivon.__all__ if n != "__version__"])
def test_every_public_name_has_a_docstring_that_mentions_each_of_its_arguments(name: str) -> None:
    value = getattr(dpivon, name)
    text = inspect.getdoc(value) or ""
    assert len(text.split()) >= 4, name
    if inspect.isclass(value):
        for key, member in vars(value).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if not key.startswith("_") and inspect.isfunction(function) and key not in REFUSALS:
                assert inspect.getdoc(function), f"{name}.{key}"
    made_elsewhere = isinstance(value, type) and issubclass(value, (Exception, dpivon.DPOptimizer))
    if not made_elsewhere and name != "CurvatureEstimator":  # a protocol
        missing = [p for p in inspect.signature(value).parameters if p not in text]
        assert not missing, (name, missing)


REFUSALS = (
    "add_noise",
    "scale_grad",
    "add_param_group",
    "zero_grad",
    "state_dict",
    "load_state_dict",
)  # torch's and Opacus's
