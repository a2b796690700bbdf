"""The file itself: whole, safe from the texts in it, and honest about what it lacks."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from report_run import copy_of, hostile_copy
from typer.testing import CliRunner

from dpivon.cli import app
from dpivon.errors import ArgumentError
from dpivon.report import build, write
from dpivon.report.figures import draw
from dpivon.report.page import embedded
from dpivon.report.run import width_chart
from dpivon.report.run_folder import read as read_run

QUICK = Path(__file__).parents[2] / "experiments" / "paper" / "results" / "quick"
HOSTILE = [
    "</script><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=2>",
    '"><svg onload=window.pwned=3>',
    "{{ 7*7 }}{% raw %}",
    "<!--<script>",
    "]]>&lt;b&gt;&amp;",
    "turned \u202e dnuora",
    "nul \x00 and half \ud800",
    "$\\frac{1}{0$ dollars",
    "x" * 300,
]


class Elements(HTMLParser):
    """Every start tag with its attributes, and the texts of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def pages(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    to = tmp_path_factory.mktemp("pages")
    hostile = hostile_copy(run, to / "hostile", HOSTILE)
    found = {"run": build(run, to / "run.html"), "study": build(QUICK, to / "study.html"), "hostile": build(hostile)}
    return {name: path.read_text() for name, path in found.items()}


@pytest.mark.parametrize("name", ["run", "study", "hostile"])
def test_the_page_asks_nobody_and_allows_only_itself(pages: dict[str, str], name: str) -> None:
    elements = Elements(pages[name])
    for tag, attributes in elements.tags:
        assert tag not in {"link", "iframe", "object", "embed", "form", "base"}
        assert not any(key.startswith("on") or key == "style" for key in attributes), (tag, attributes)
        for key in ("src", "href"):
            assert (attributes.get(key) or "#").startswith(("#", "data:image/png;base64,"))
    style = re.search(r"<style>(.*?)</style>", pages[name], re.S).group(1)
    assert "url(" not in style
    assert "@import" not in style
    policy = next(a["content"] for t, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy")
    for text in (style, elements.scripts[1]):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


@pytest.mark.parametrize("name", ["run", "study", "hostile"])
def test_it_can_be_read_without_eyes(pages: dict[str, str], name: str) -> None:
    tags = Elements(pages[name]).tags
    levels = [int(tag[1]) for tag, _ in tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    assert all(attributes.get("alt") for tag, attributes in tags if tag == "img")
    assert all(attributes.get("scope") for tag, attributes in tags if tag == "th")
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in tags:
        for key in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(key) is None or attributes[key] in ids
        if (attributes.get("href") or "").startswith("#"):
            assert attributes["href"][1:] in ids


@pytest.mark.parametrize("name", ["run", "study"])
def test_code_is_set_as_code_and_not_in_backticks(pages: dict[str, str], name: str) -> None:
    shown = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", pages[name], flags=re.S)
    assert "`" not in re.sub(r"<[^>]*>", "", shown)


def test_no_class_name_becomes_markup(pages: dict[str, str]) -> None:
    honest, hostile = Elements(pages["run"]), Elements(pages["hostile"])
    assert [tag for tag, _ in hostile.tags].count("script") == 2
    assert {t for t, _ in hostile.tags} <= {t for t, _ in honest.tags}
    names = json.loads(hostile.scripts[0])["width"]["views"][0]["y"]["names"]
    assert names[:6] == HOSTILE[:6]
    assert names[7] == "nul \ufffd and half \ufffd"
    assert "{{ 7*7 }}" in pages["hostile"]
    assert "\u202e" not in pages["hostile"]
    assert "&lt;/script&gt;&lt;script&gt;window.pwned=1" in pages["hostile"]


def test_embedded_json_is_the_same_value_and_no_markup() -> None:
    value = {"a": ["</script>", "<!--", "&amp;", "\u2028", "é", 1.5, None]}
    text = embedded(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028") & set(text)
    with pytest.raises(ValueError, match="JSON"):
        embedded([float("nan")])


def test_the_same_folder_gives_the_same_bytes(run: Path, tmp_path: Path) -> None:
    folder = copy_of(run, tmp_path / "run")
    before = build(folder).read_bytes()
    assert build(folder).read_bytes() == before
    layers = width_chart(read_run(folder).layers)
    first, second = ([p.read_bytes() for p in draw([layers], None, tmp_path / d, ("png", "pdf"))] for d in "ab")
    assert first == second


def test_a_bare_summary_gives_a_page_that_says_what_it_lacks(tmp_path: Path) -> None:
    bare = {"format": 1, "method": "dp-sgd", "epsilon": 2.5, "delta": 1e-6, "accountant": "rdp"}
    (tmp_path / "summary.json").write_text(json.dumps(bare))
    built = write(tmp_path)
    text = built.report.read_text()
    assert len(built.left_out) == 7
    for sentence in built.left_out.values():
        assert sentence.endswith(".")
        assert sentence.replace("’", "'") in text.replace("’", "'")
    assert "could not be checked" in text
    assert built.sections == ("What the model can reveal about one person", "Versions and hardware")


def test_scores_without_predictions_are_shown(tmp_path: Path) -> None:
    summary = {"format": 1, "method": "dp-sgd", "epsilon": 2.5, "delta": 1e-6, "metrics": {"accuracy": 0.8125}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert "0.8125" in build(tmp_path).read_text()


def test_a_point_estimate_has_one_reliability_diagram(run: Path, tmp_path: Path) -> None:
    folder = copy_of(run, tmp_path / "point")
    (folder / "posterior.json").unlink()
    with np.load(folder / "test.npz") as file:
        arrays = {k: file[k] for k in ("probabilities", "targets")}
    np.savez(folder / "test.npz", mean_probabilities=arrays["probabilities"], **arrays)
    built = write(folder)
    data = json.loads(Elements(built.report.read_text()).scripts[0])
    assert [p["title"].split(":")[0] for p in data["reliability"]["views"][0]["panels"]] == ["prediction"]
    assert "Posterior width by layer" in built.left_out
    assert "number " in built.report.read_text()  # examples without images, in a table


DAMAGE = {
    "no JSON": ("summary.json", b"{"),
    "another format": ("summary.json", b'{"format": 2, "method": "x", "epsilon": 1, "delta": 0.1}'),
    "no epsilon": ("summary.json", b'{"format": 1, "method": "x", "delta": 0.1}'),
    "no text": ("summary.json", b"\xff\xfe"),
    "no YAML": ("config.yaml", b"a: [1"),
    "a line in the middle": ("progress.jsonl", b'{"step": 1}\n{"step\n{"step": 3}\n'),
    "no archive": ("test.npz", b"PK\x03\x04 cut"),
    "no layers": ("posterior.json", b'{"layers": [{"name": "a"}]}'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_named_and_nothing_is_written(run: Path, tmp_path: Path, damage: str) -> None:
    folder = copy_of(run, tmp_path / "run")
    name, content = DAMAGE[damage]
    (folder / name).write_bytes(content)
    with pytest.raises(ArgumentError, match=re.escape(name)):
        build(folder, tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_predictions_that_are_none_and_pickles_are_refused(run: Path, tmp_path: Path) -> None:
    folder = copy_of(run, tmp_path / "run")
    labels, p = np.zeros(3, np.int64), np.full((3, 2), 0.5, np.float32)
    np.savez(folder / "test.npz", probabilities=np.array([{}], dtype=object), mean_probabilities=p, targets=labels)
    with pytest.raises(ArgumentError, match=r"test\.npz"):
        build(folder, tmp_path / "out.html")
    np.savez(folder / "test.npz", probabilities=p + 1, mean_probabilities=p, targets=labels)
    with pytest.raises(ArgumentError, match="probability"):
        build(folder, tmp_path / "out.html")
    shown = {"images": np.zeros((1, 4, 4, 3), np.uint8), "image_index": np.array([3])}
    np.savez(folder / "test.npz", probabilities=p, mean_probabilities=p, targets=labels, **shown)
    with pytest.raises(ArgumentError, match="image_index"):
        build(folder, tmp_path / "out.html")


def test_a_last_line_that_a_crash_tore_is_left_out(run: Path, tmp_path: Path) -> None:
    folder = copy_of(run, tmp_path / "run")
    whole = (folder / "progress.jsonl").read_text()
    before = build(folder).read_text()
    (folder / "progress.jsonl").write_text(whole + '{"step": 9, "eps')
    assert build(folder).read_text() == before


def test_files_that_are_no_reports_are_left_alone(run: Path, tmp_path: Path) -> None:
    folder = copy_of(run, tmp_path / "run")
    before = (folder / "ledger.jsonl").read_bytes()
    for out in (folder / "ledger.jsonl", folder):
        with pytest.raises(ArgumentError, match="out="):
            build(folder, out)
    with pytest.raises(ArgumentError, match="figures="):
        build(folder, figures=folder / "summary.json")
    assert (folder / "ledger.jsonl").read_bytes() == before


def test_the_command_writes_tells_and_refuses(run: Path, tmp_path: Path) -> None:
    folder = copy_of(run, tmp_path / "a run")
    words = ["report", str(folder), "--figures", str(tmp_path / "figures"), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert told["kind"] == "run"
    assert told["left_out"] == {}
    assert Path(told["report"]) == folder / "report.html"
    assert f"dpivon report &#39;{folder}&#39; --figures" in (folder / "report.html").read_text()
    names = {Path(path).name for path in told["figures"]}
    assert names >= {"epsilon.png", "reliability.pdf", "risk-coverage.png", "width.pdf", "confusion.png"}
    for path in told["figures"]:
        if path.endswith(".png"):
            with Image.open(path) as image:
                assert min(image.size) > 250
        else:
            assert Path(path).read_bytes().startswith(b"%PDF")
    refused = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert refused.exit_code == 2
    assert "holds neither summary.json nor runs.csv" in refused.stderr


@pytest.mark.slow
def test_a_studys_figures_are_its_own(tmp_path: Path) -> None:
    figures = write(QUICK, tmp_path / "study.html", tmp_path / "figures").figures
    assert {path.name for path in figures} >= {"curves-1.png", "curves-2.pdf", "widths.pdf"}


def test_hostile_class_names_can_be_drawn(tmp_path: Path) -> None:
    counts = [[i + j for i in range(10)] for j in range(10)]
    figure, _ = draw([], (tuple(HOSTILE), counts), tmp_path, ("png", "pdf"))
    assert figure.stat().st_size > 10_000
