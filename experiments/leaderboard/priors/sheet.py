"""Contact sheets: 8×8 images of every random process, one PNG file per process.

python -m experiments.leaderboard.priors.sheet --out experiments/leaderboard/priors/results
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dpivon.priors.processes import PROCESSES, images

ACROSS = 8


def sheet(pixels: Tensor) -> np.ndarray:
    """[ACROSS·H, ACROSS·W, 3] from ACROSS² images [n, 3, H, W]."""
    _, channels, h, w = pixels.shape
    rows = pixels.view(ACROSS, ACROSS, channels, h, w).permute(0, 3, 1, 4, 2)
    return rows.reshape(ACROSS * h, ACROSS * w, channels).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--size", type=int, default=32, help="of an image; the network's inputs have 32")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    for name in PROCESSES:
        pixels = images(name, ACROSS**2, torch.Generator().manual_seed(a.seed), a.size)
        Image.fromarray(sheet(pixels)).save(a.out / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
