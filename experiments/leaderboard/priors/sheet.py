"""Contact sheets: 8×8 images of every random process, one PNG file per process; and one image with a row per process.

python -m experiments.leaderboard.priors.sheet --out FOLDER --rows docs/images/priors-processes.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from dpivon.priors.processes import PROCESSES, images

ACROSS = 8


def sheet(pixels: Tensor) -> np.ndarray:
    """[ACROSS·H, ACROSS·W, 3] from ACROSS² images [n, 3, H, W]."""
    _, channels, h, w = pixels.shape
    rows = pixels.view(ACROSS, ACROSS, channels, h, w).permute(0, 3, 1, 4, 2)
    return rows.reshape(ACROSS * h, ACROSS * w, channels).numpy()


def rows(path: Path, seed: int, size: int = 48, across: int = 12) -> None:
    """One labelled row of images per process."""
    label = 80
    whole = Image.new("RGB", (label + across * (size + 2), len(PROCESSES) * (size + 4)), "white")
    pen = ImageDraw.Draw(whole)
    for i, name in enumerate(PROCESSES):
        top = i * (size + 4)
        pen.text((4, top + size // 2 - 6), name, fill="black", font_size=14)
        for j, pixels in enumerate(images(name, across, torch.Generator().manual_seed(seed), size)):
            whole.paste(Image.fromarray(pixels.permute(1, 2, 0).numpy()), (label + j * (size + 2), top))
    whole.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--rows", type=Path, default=None, help="a PNG file with one row of images per process")
    parser.add_argument("--size", type=int, default=32, help="of an image; the network's inputs have 32")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    for name in PROCESSES:
        pixels = images(name, ACROSS**2, torch.Generator().manual_seed(a.seed), a.size)
        Image.fromarray(sheet(pixels)).save(a.out / f"{name}.png", optimize=True)
    if a.rows is not None:
        rows(a.rows, a.seed)


if __name__ == "__main__":
    main()
