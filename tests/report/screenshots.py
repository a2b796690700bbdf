"""The pictures of docs/reports.md: `PYTHONPATH=tests/report python tests/report/screenshots.py docs/images`.

A run trained on scikit-learn's digits and the study in experiments/paper/results/quick, in Debian's chromium.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright
from report_run import make_run
from test_report_browser import CHROMIUM, FLAGS, QUICK

from dpivon.report import build


def main(to: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as p:
        run, study = build(make_run(Path(folder, "run"))), build(QUICK, Path(folder, "study.html"))
        context = p.chromium.launch_persistent_context(
            Path(folder, "profile"),
            executable_path=CHROMIUM,
            args=FLAGS.split(),
            viewport={"width": 1000, "height": 1100},
        )
        page = context.new_page()
        page.goto(run.as_uri())
        take(page, to / "report-light.png")
        page.emulate_media(color_scheme="dark")
        page.goto(study.as_uri())
        hover(page)
        take(page, to / "report-dark.png")
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 390, "height": 1100})
        page.goto(run.as_uri())
        page.locator("#fig-reliability").evaluate("e => window.scrollTo({top: e.offsetTop - 20, behavior: 'instant'})")
        take(page, to / "report-phone.png")
        page.set_viewport_size({"width": 673, "height": 1000})
        page.emulate_media(media="print", color_scheme="dark")
        page.goto(run.as_uri())
        page.locator("#test").evaluate("e => window.scrollTo({top: e.offsetTop, behavior: 'instant'})")
        take(page, to / "report-print.png")
        context.close()


def hover(page: Any) -> None:
    """A point of the study's curves, with its values beside it."""
    figure = page.locator("#fig-curves")
    figure.evaluate("e => window.scrollTo({top: e.offsetTop - 420, behavior: 'instant'})")
    box = figure.locator("svg[data-panel='0'] .series[data-series='DP-SGD, C = 1'] rect").nth(1).bounding_box()
    page.mouse.move(box["x"] + 3, box["y"] + 6)


def take(page: Any, path: Path) -> None:
    """In 256 colours: text and lines need no more, and the repository stays small."""
    page.wait_for_timeout(600)
    page.screenshot(path=path)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
