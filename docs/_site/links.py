"""Pages link to files of the repository as a reader of the repository would: ../results/…, ../examples/….

On the site such a file is a page or a copy of its own under repository/. Text and programs become pages, a folder a list of
what is in it, everything else is copied as it is. Links inside the files that came along are followed too, so that nothing on
the site points nowhere.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
UNDER = "repository"
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.S | re.M)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".csv": "text", ".txt": "text"}


def prose(text: str) -> list[tuple[bool, str]]:
    """The text in pieces: (whether it is prose, piece). What stands in fences is no link."""
    pieces, at = [], 0
    for fence in FENCE.finditer(text):
        pieces += [(True, text[at : fence.start()]), (False, fence.group(0))]
        at = fence.end()
    return [*pieces, (True, text[at:])]


def is_local(link: str) -> bool:
    return "://" not in link and not link.startswith("mailto:")


def links(text: str) -> list[tuple[str, str]]:
    """Targets and anchors of the links to files, in the order of the text."""
    found = [match for is_prose, piece in prose(text) if is_prose for match in LINK.finditer(piece)]
    return [(m[2], m[3] or "") for m in found if is_local(m[2])]


def in_repository(page: str) -> str:
    """Where a page of the site lies in the repository."""
    if not page.startswith(f"{UNDER}/"):
        return f"docs/{page}"
    own = page.removeprefix(f"{UNDER}/")
    return own.removesuffix(".md") if Path(own.removesuffix(".md")).suffix in LANGUAGES else own


def site_path(path: str) -> str:
    """Where a file or folder of the repository lies on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{UNDER}/{path}/index.md"
    return f"{UNDER}/{path}" + (".md" if Path(path).suffix in LANGUAGES else "")


def target(page: str, link: str) -> str:
    """The path in the repository that a link on a page of the site means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(page)), link))


def as_page(path: Path) -> str | None:
    """A program, a table or a folder as a page; None for what is a page already, or none."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        return "\n".join([f"# `{name}`", "", *(f"- [{file}]({file})" for file in inside)]) + "\n"
    if path.suffix in LANGUAGES:
        return f"# `{name}`\n\n````{LANGUAGES[path.suffix]}\n{path.read_text().rstrip()}\n````\n"
    return None


def brought(pages: dict[str, str]) -> dict[str, Path]:
    """What these pages (by their place on the site) link to in the repository, whole chains of it."""
    found: dict[str, Path] = {}
    waiting = list(pages.items())
    while waiting:
        page, text = waiting.pop()
        for link, _ in links(text):
            path = target(page, link)
            place, file = site_path(path), ROOT / path
            if path.startswith(("docs/", "..")) or place in found or not file.exists():
                continue
            found[place] = file
            if file.suffix == ".md" or file.is_dir():
                waiting.append((place, as_page(file) or file.read_text()))
    return found


def rewritten(page: str, text: str) -> str:
    """The page with its links as they are on the site."""

    def one(match: re.Match[str]) -> str:
        link = match[2]
        path = target(page, link) if is_local(link) else ".."
        if path.startswith("..") or not (ROOT / path).exists():
            return match[0]
        return (
            f"{match[1]}{posixpath.relpath(site_path(path), posixpath.dirname(page) or '.')}{match[3] or ''}{match[4]}"
        )

    return "".join(LINK.sub(one, piece) if is_prose else piece for is_prose, piece in prose(text))


# ---- what mkdocs calls


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for place, path in brought(pages).items():
        content = as_page(path)
        source = {"abs_src_path": str(path)} if content is None else {"content": content}
        files.append(File.generated(config, place, **source))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return rewritten(page.file.src_uri, markdown)
