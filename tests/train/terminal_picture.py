"""The picture of docs/train.md: `python tests/train/terminal_picture.py docs/images/train-terminal.png`.

What `dpivon train` and `dpivon predict` print for the table of examples/train_patients.py, drawn by Debian's chromium.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
WIDTH = 108
COMMANDS = (
    "dpivon train patients.csv --schema patients.yaml --epsilon 3 --delta 1e-4 --dataset-size 400 --out run",
    "dpivon predict run/model new-patients.csv --out predictions.csv",
)


def main(to: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write = "import sys; sys.path.insert(0, sys.argv[1]); import train_patients; train_patients.write_tables()"
        subprocess.run([sys.executable, "-c", write, ROOT / "examples"], cwd=folder, check=True)
        (Path(folder) / "patients.yaml").write_text((ROOT / "examples/patients.yaml").read_text())
        console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
        for command in COMMANDS:
            console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
            console.print(Text.from_ansi(printed(command, folder)))
        page_of(console.export_html(inline_styles=True), Path(folder) / "page.html", to)


def printed(command: str, folder: str) -> str:
    """What a terminal shows: of the bar, which is drawn again and again, the one in the middle of the run."""
    environment = os.environ | {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    lines = [line.split("\r")[-1] for line in done.stdout.splitlines()]
    bars = [i for i, line in enumerate(lines) if line.rstrip("\x1b[0m").endswith(" left")]
    shown = set(range(len(lines))) - set(bars) | set(bars[len(bars) // 2 :][:1])
    return "\n".join(lines[i] for i in sorted(shown))


def page_of(html: str, page: Path, to: Path) -> None:
    page.write_text(html.replace("<body>", '<body style="margin:16px;background:#fff;font-size:14px">', 1))
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        view = browser.new_page(viewport={"width": 960, "height": 600})
        view.goto(page.as_uri())
        view.screenshot(path=to, full_page=True)
        browser.close()
    with Image.open(to) as image:
        small = image.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    small.save(to, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
