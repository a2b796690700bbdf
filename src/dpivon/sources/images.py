"""A folder of images: one folder per class, PNG or JPEG, brought to a declared size and scaled by public constants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from dpivon.errors import ArgumentError, bad
from dpivon.sources.base import IMAGES, Examples, Source, Targets, class_of, no_examples
from dpivon.sources.columns import Array

_LEFT_BEHIND = ("Thumbs.db", "desktop.ini")  # by Windows; macOS's .DS_Store begins with a dot


class Images(Source):
    """Every image is turned upright, resized to ``size`` × ``size``, and its bytes mapped from 0…255 to [−1, 1]."""

    kind: Literal["image"] = "image"
    size: Annotated[int, Field(ge=4, le=1024)] = 32
    channels: Literal[1, 3] = 3

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, self.size, self.size)

    def describe(self) -> str:
        return f"{'a grey' if self.channels == 1 else 'an RGB'} image of {self.size} × {self.size}"

    def not_chosen(self) -> list[str]:
        return [
            "No mean image and no channel statistics: bytes 0 to 255 are mapped to −1 to 1.",
            "No size was read off the images: each was resized to the declared one.",
        ]

    def read(self, where: str, targets: Targets | None) -> Examples:
        folder = Path(where)
        if not isinstance(targets, tuple):
            files = _files(folder, deep=True) if folder.is_dir() else [folder]
            found = None
        else:
            labelled = _labelled(folder, targets)
            files, found = [path for path, _ in labelled], torch.tensor([index for _, index in labelled])
        if not files:
            raise no_examples(where)
        images = np.stack([self._read(path) for path in files])  # uint8 [n, H, W, channels]
        inputs = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1.0
        names = [path.relative_to(folder).as_posix() if path != folder else path.name for path in files]
        return Examples(inputs.contiguous(), found, names, np.broadcast_to(images, (*images.shape[:3], 3)))

    def _read(self, path: Path) -> Array:
        from PIL import Image, ImageOps

        fix = "Replace it with a PNG or JPEG of 8 bits per channel, or remove it"
        try:
            with Image.open(path, formats=("PNG", "JPEG")) as opened:
                if opened.mode.startswith(("I", "F")):
                    raise bad("data", str(path), "has more than 8 bits per channel", fix)
                mode = "L" if self.channels == 1 else "RGB"
                upright: Any = ImageOps.exif_transpose(opened)
                upright = upright.convert("RGBA") if "transparency" in opened.info else upright
                image = upright.convert(mode).resize((self.size, self.size), Image.Resampling.BILINEAR)
        except ArgumentError:
            raise
        except Exception as error:  # a damaged image raises one of a dozen kinds
            raise bad("data", str(path), f"cannot be read as an image ({error})", fix) from None
        return np.asarray(image, dtype=np.uint8).reshape(self.size, self.size, self.channels)


def _labelled(folder: Path, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    """Files by declared class. A folder of another name is refused; a declared class may have none."""
    if not folder.is_dir():
        raise bad("data", str(folder), "is not a folder", "Give a folder that holds one folder of images per class")
    out = []
    for inner in _entries(folder):
        if not inner.is_dir():
            problem = f"holds {inner.name}, which is in no class"
            raise bad("data", str(folder), problem, "Put every image into the folder of its class")
        found = classes.index(inner.name) if inner.name in classes else None
        index = class_of(found, inner.name, f"a folder in {folder}", classes)
        out += [(path, index) for path in _files(inner, deep=False)]
    return out


def _files(folder: Path, deep: bool) -> list[Path]:
    """Images by name; with ``deep`` those in folders too."""
    out: list[Path] = []
    for path in _entries(folder):
        if path.is_dir() and deep:
            out += _files(path, deep=True)
        elif path.suffix.lower() not in IMAGES:
            raise bad("data", str(path), "is neither PNG nor JPEG", "Convert it, or move it out of the folder")
        else:
            out.append(path)
    return out


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(
            path for path in folder.iterdir() if not path.name.startswith(".") and path.name not in _LEFT_BEHIND
        )
    except OSError as error:
        raise bad("data", str(folder), f"cannot be read ({error})", "Check the path and its permissions") from None
