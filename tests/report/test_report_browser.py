"""Reports as readers see them: in Debian's chromium, from disk, by mouse, keyboard, phone and printer."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_run import hostile_copy

from dpivon.report import build

ENABLE = "make browser && .venv/bin/python -m pip install playwright"
playwright = pytest.importorskip("playwright.sync_api", reason=f"no playwright; enable with: {ENABLE}")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=f"no chromium; enable with: {ENABLE}")]
QUICK = Path(__file__).parents[2] / "experiments" / "paper" / "results" / "quick"
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
FLAGS += "--disable-component-update --disable-sync"
HOSTILE = ["</script><script>window.pwned=1</script>", "<img src=x onerror=window.pwned=2>"]


class Seen:
    """A page with everything that it said or asked for."""

    def __init__(self, page: Any, reports: dict[str, Path]) -> None:
        self.page, self.reports = page, reports
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda m: self.said.append(f"{m.type}: {m.text}"))
        page.on("pageerror", lambda e: self.said.append(f"error: {e}"))
        page.on("dialog", lambda d: (self.said.append(f"dialog: {d.message}"), d.dismiss()))
        page.on("request", lambda r: self.asked.append(r.url))

    def open(
        self, name: str, *, width: int = 1100, media: str = "screen", colours: str = "light", unfolded: bool = True
    ) -> Any:
        """The report in a fresh state; ``unfolded`` with every section open."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(media=media, color_scheme=colours)
        self.page.goto(self.reports[name].as_uri())
        self.page.evaluate("localStorage.clear()")
        self.page.reload()
        if unfolded:
            self.page.evaluate("document.querySelectorAll('.fold').forEach((fold) => fold.open = true)")
            self.page.wait_for_timeout(50)  # until figures have the width of their sections
        return self.page


@pytest.fixture(scope="module")
def seen(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    to = tmp_path_factory.mktemp("browser")
    hostile = hostile_copy(run, to / "hostile", HOSTILE)
    reports = {"run": build(run, to / "run.html"), "study": build(QUICK, to / "study.html"), "hostile": build(hostile)}
    with playwright.sync_playwright() as p:
        context = p.chromium.launch_persistent_context(to / "profile", executable_path=CHROMIUM, args=FLAGS.split())
        yield Seen(context.new_page(), reports)
        context.close()


@pytest.fixture(autouse=True)
def _nothing_is_said_or_asked(seen: Seen) -> Iterator[None]:
    """In every test: no error on the console, and no request but for the file and the pictures in it."""
    seen.said.clear()
    seen.asked.clear()
    yield
    assert seen.said == []
    assert seen.asked
    assert all(url.startswith(("file:///", "data:image/png;base64,")) for url in seen.asked)


def ticks(figure: Any, axis: str, panel: int = 0) -> list[str]:
    return figure.locator(f"svg[data-panel='{panel}'] .tick-{axis}").all_text_contents()


def drawn(figure: Any) -> set[str]:
    return set(figure.locator(".series").evaluate_all("all => all.map((g) => g.dataset.series)"))


def marks(page: Any, figure: Any, series: str, panel: int = 0) -> list[dict[str, float]]:
    """Where a series' points lie on the screen; the figure is brought into view first."""
    figure.scroll_into_view_if_needed()
    found = figure.locator(f"svg[data-panel='{panel}'] .series[data-series={series!r}]").locator(
        "circle, rect, path[fill]"
    )
    boxes = [found.nth(i).bounding_box() for i in range(found.count())]
    return [b for b in boxes if b and b["width"] < 20]


def test_every_section_and_figure_of_a_run_is_there(seen: Seen) -> None:
    page = seen.open("run")
    for name in ("privacy", "training", "test", "examples", "width", "configuration", "choices", "ledger", "versions"):
        assert page.locator(f"section#{name} h2").is_visible()
    panels = {"epsilon": 1, "heldout": 1, "reliability": 2, "risk-coverage": 1, "width": 1}
    for name, count in panels.items():
        svg = page.locator(f"#fig-{name} svg[data-panel]")
        assert svg.count() == count
        assert svg.first.get_attribute("aria-label")
        assert page.locator(f"#fig-{name} .series").count() > 0
    assert page.locator("#confusion tbody tr").count() == 10
    assert page.locator(".examples li").count() == 24
    assert page.locator(".examples img").first.evaluate("i => i.naturalWidth") == 64


def test_sections_fold_and_links_open_them(seen: Seen) -> None:
    page = seen.open("run", unfolded=False)
    assert page.locator("#confusion").is_visible()
    assert not page.locator("#fig-width").is_visible()
    page.locator("nav a[href='#width']").click()
    page.wait_for_timeout(50)
    assert page.locator("#fig-width svg[data-panel]").is_visible()
    page.locator("#width summary h2").click()
    assert not page.locator("#fig-width").is_visible()


def test_series_are_toggled_by_the_legend(seen: Seen) -> None:
    page = seen.open("study")
    figure = page.locator("#fig-curves")
    assert figure.locator("svg[data-panel]").count() == 2
    before = drawn(figure)
    assert {"DP-SGD, C = 1", "DP-Adam, C = 2", "DP-IVON-Gradsq, averaged, C = 1"} <= before
    button = figure.locator("button[data-group='DP-SGD']")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert drawn(figure) == {name for name in before if not name.startswith("DP-SGD")}
    figure.locator("button[data-group='C = 2']").click()
    assert all(name.endswith("C = 1") for name in drawn(figure))
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert drawn(figure) == {name for name in before if name.endswith("C = 1")}


def test_the_chooser_changes_what_is_drawn(seen: Seen) -> None:
    page = seen.open("study")
    figure = page.locator("#fig-curves")
    accuracy = ticks(figure, "y")
    assert max(map(float, accuracy)) == 1
    figure.get_by_label("Show").select_option(label="test NLL (nats)")
    assert ticks(figure, "y") != accuracy
    assert figure.locator("svg[data-panel='0'] text", has_text="test NLL (nats)").count() == 1
    shown = [float(t) for t in ticks(figure, "x")]
    places = figure.locator("svg[data-panel='0'] .tick-x").evaluate_all(
        "all => all.map((t) => Number(t.getAttribute('x')))"
    )
    right_to_left = [value for _, value in sorted(zip(places, shown, strict=True))]
    assert right_to_left == sorted(shown, reverse=True)  # ε falls to the right


def test_buttons_and_dragging_zoom_and_reset(seen: Seen) -> None:
    page = seen.open("study")
    figure = page.locator("#fig-curves")
    whole = ticks(figure, "x"), ticks(figure, "y")
    figure.get_by_role("button", name="Zoom in").click()
    assert (ticks(figure, "x"), ticks(figure, "y")) != whole
    figure.get_by_role("button", name="Zoom out").click()
    assert (ticks(figure, "x"), ticks(figure, "y")) == whole
    figure.scroll_into_view_if_needed()
    box = figure.locator("svg[data-panel='1']").bounding_box()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 160, steps=4)
    page.mouse.up()
    zoomed = ticks(figure, "x"), ticks(figure, "y")
    assert zoomed != whole
    assert zoomed == (ticks(figure, "x", 1), ticks(figure, "y", 1))  # panels share their axes
    assert all(0.3 < float(t) < 6 for t in zoomed[0])
    figure.get_by_role("button", name="Reset the zoom").click()
    assert (ticks(figure, "x"), ticks(figure, "y")) == whole


def test_hovering_tells_a_points_values(seen: Seen) -> None:
    page = seen.open("study")
    figure = page.locator("#fig-curves")
    tip = figure.get_by_role("tooltip", include_hidden=True)
    assert not tip.is_visible()
    for group in ("DP-Adam", "DP-IVON-Gradsq, posterior mean", "DP-IVON-Gradsq, averaged", "C = 2"):
        figure.locator(f"button[data-group='{group}']").click()
    spots = marks(page, figure, "DP-SGD, C = 1")
    assert len(spots) == 3
    left = min(spots, key=lambda b: b["x"])  # the largest ε
    page.mouse.move(left["x"] + left["width"] / 2 + 2, left["y"] + left["height"] / 2)
    told = tip.inner_text()
    assert "DP-SGD, C = 1" in told
    assert "ε (RDP): 28.5" in told
    assert "σ, C, b: 0.5, 1, 64" in told
    mean = float(re.search(r"test accuracy: ([\d.]+)", told).group(1))
    runs = [float(v) for v in re.search(r"runs: ([\d., ]+)", told).group(1).split(", ")]
    assert mean == pytest.approx(sum(runs) / len(runs), abs=2e-4)
    page.mouse.move(5, 5)
    assert not tip.is_visible()


def test_the_keyboard_reads_points_and_zooms(seen: Seen) -> None:
    page = seen.open("run")
    figure = page.locator("#fig-epsilon")
    figure.locator("svg[data-panel]").focus()
    page.keyboard.press("ArrowRight")
    first = page.locator("#live").text_content()
    assert re.match(r"ε; step: 11; ε spent: [\d.]+$", first)
    page.keyboard.press("ArrowRight")
    assert "step: 22" in page.locator("#live").text_content()
    whole = ticks(figure, "x")
    page.keyboard.press("+")
    assert ticks(figure, "x") != whole
    page.keyboard.press("0")
    assert ticks(figure, "x") == whole
    assert page.evaluate("document.activeElement.dataset.panel") == "0"


def ground(page: Any) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_dark_and_light_follow_the_system_and_the_button(seen: Seen) -> None:
    light = ground(seen.open("run", colours="light"))
    page = seen.open("run", colours="dark")
    dark = ground(page)
    line = page.locator("#fig-epsilon .series path").last.evaluate("p => getComputedStyle(p).stroke")
    assert dark != light
    page.get_by_role("button", name="Switch to light colours").click()
    assert ground(page) == light
    assert page.locator("#fig-epsilon .series path").last.evaluate("p => getComputedStyle(p).stroke") != line
    page.reload()
    assert ground(page) == light  # kept
    page.get_by_role("button", name="Switch to dark colours").click()
    assert ground(page) == dark
    page.emulate_media(media="print", color_scheme="dark")
    assert ground(page) == light  # paper is white


@pytest.mark.parametrize("name", ["run", "study", "hostile"])
@pytest.mark.parametrize("width", [320, 390, 1100])
def test_nothing_runs_out_of_the_window(seen: Seen, name: str, width: int) -> None:
    page = seen.open(name, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.evaluate(
        """() => [...document.querySelectorAll("figure .panel > svg, figure button, h1, h2, p")].filter((e) =>
           e.getBoundingClientRect().right > innerWidth + 1 || e.getBoundingClientRect().left < -1).length"""
    )
    assert cut == 0


@pytest.mark.parametrize("name", ["run", "study"])
def test_paper_gets_everything(seen: Seen, name: str) -> None:
    width = 673  # of A4 between the margins, in pixels
    page = seen.open(name, width=width, media="print", unfolded=False)
    cut = page.evaluate(
        """() => [...document.querySelectorAll("main :not(.hidden)")].filter((e) => e.checkVisibility() && !e.closest("svg")
           && (e.getBoundingClientRect().right > innerWidth + 1
               || (getComputedStyle(e).overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1)))
           .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert cut == []
    assert not page.locator("nav").is_visible()
    assert not page.locator(".zoom").first.is_visible()
    pages = len(re.findall(rb"/Type\s*/Page\b(?!s)", page.pdf(format="A4", print_background=True)))
    assert 2 <= pages <= 20


def test_a_hostile_class_name_stays_text(seen: Seen) -> None:
    page = seen.open("hostile")
    assert page.evaluate("window.pwned") is None
    assert page.locator("#confusion thead th").nth(1).inner_text() == HOSTILE[0]
    assert page.locator("script").count() == 2
    assert page.locator("img").evaluate_all("all => all.every((i) => i.src.startsWith('data:'))")
    assert page.locator("#fig-width .tick-y").first.text_content() == f"{HOSTILE[0][:11]}…{HOSTILE[0][-12:]}"
