"""`dpivon train` on a folder of images, one folder a class: scikit-learn's digits written as PNG files."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from dpivon.cli import app

TRAIN = 1400


def write_images() -> None:
    digits = load_digits()
    for i, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        folder = Path("digits" if i < TRAIN else "new-digits") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        # The scanner counts 0 to 16; an image file 0 to 255.
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(folder / f"{i}.png")


def dpivon(command: str) -> None:
    print(f"$ dpivon {command}", flush=True)
    app(command.split(), standalone_mode=False)


def main() -> None:
    write_images()
    dpivon(
        "train digits --classes 0,1,2,3,4,5,6,7,8,9 --image-size 8 --channels 1 --epsilon 8 --delta 1e-4 "
        "--dataset-size 1400 --epochs 20 --test new-digits --out digits-run"
    )
    dpivon("predict digits-run/model new-digits --out predictions.csv")
    summary = json.loads(Path("digits-run/summary.json").read_text(encoding="utf-8"))
    print(f"epsilon = {summary['epsilon']:.2f}, accuracy on the others {summary['metrics']['mc_accuracy']:.2f}")


if __name__ == "__main__":
    main()
