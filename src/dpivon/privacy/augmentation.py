"""Augmentation multiplicity: random flips and crops, several views of every drawn image.

An example's gradient is the mean over its views, taken before clipping; so it moves the clipped sum by at most C, however many
views there are. More views cost time and no budget. (De et al., *Unlocking High-Accuracy Differentially Private Image
Classification through Scale*, 2022.)

Which view is drawn depends on the run's seed, the place in its streams and the example's number alone: not on the rest of the
batch, nor on its content. Given the views, a release is the usual one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpivon.errors import bad, check_choice, check_whole

PADDINGS = ("reflect", "zeros")
_WORD_BITS = 32


@dataclass(frozen=True)
class Augmentation:
    """``views`` of every drawn image, each flipped and moved at random.

    Attributes:
        views: how many; every example costs so many forward and backward passes.
        flip: turn left and right with probability ½.
        crop: move by up to so many pixels in each direction, as if cut out of the image with a margin of that width.
        padding: what is in the margin, "reflect" (the image mirrored) or "zeros".
    """

    views: int = 1
    flip: bool = False
    crop: int = 0
    padding: str = "reflect"

    def __post_init__(self) -> None:
        views = check_whole("views", self.views, "Use 4, or 1 for one view per image", at_least=1)
        crop = check_whole("crop", self.crop, "Use 4 for images of 32×32, or 0 for no crop")
        if not isinstance(self.flip, bool):
            raise bad("flip", self.flip, "is neither true nor false", "Say whether images may be mirrored")
        check_choice("padding", self.padding, PADDINGS, "Say what is in the margin")
        for name, value in (("views", views), ("crop", crop)):
            object.__setattr__(self, name, value)  # 4.0 is 4

    @property
    def changes(self) -> bool:
        """Whether it does anything: one view that is neither flipped nor moved is the image itself."""
        return self.views > 1 or self.flip or self.crop > 0

    def check(self, inputs: Tensor) -> None:
        """Refuse inputs that are not images, by their shape alone."""
        if inputs.dim() != 4:
            problem = f"makes views of images, and the inputs have shape {tuple(inputs.shape)}"
            raise bad("augment", self, problem, "Give inputs of shape [N, channels, height, width], or no augment")
        side = min(inputs.shape[2:])
        if self.crop >= side:
            raise bad("crop", self.crop, f"is as large as the images, which have {side} pixels", "Use fewer")

    def choice(self, words: Sequence[Tensor]) -> Tensor:
        """From words of 32 random bits to what is done to each view: [..., 3], whether it is flipped, and how far it is moved
        down and right, from 0 to 2·crop."""
        flip = words[0] & 1 if self.flip else torch.zeros_like(words[0])
        # A word times n, without its lower half, is uniform on 0 … n − 1 up to n·2⁻³².
        moved = [(word * (2 * self.crop + 1)) >> _WORD_BITS for word in words[1:3]]
        return torch.stack([flip, *moved], -1)

    def apply(self, images: Tensor, choice: Tensor) -> Tensor:
        """The views of images [n, channels, height, width] that ``choice`` [n, views, 3] describes, an example's one after the
        other: [n·views, channels, height, width]. Positions are computed and nothing is copied but the pixels."""
        n, channels, height, width = images.shape
        flip, down, right = choice.unbind(-1)  # [n, views]
        rows, above = self._line(down, height)
        columns, beside = self._line(right, width)
        columns = torch.where(flip.unsqueeze(-1) > 0, width - 1 - columns, columns)
        pixels = (rows.unsqueeze(-1) * width + columns.unsqueeze(-2)).flatten(2).unsqueeze(2)  # [n, views, 1, pixels]
        shape = n, choice.shape[1], channels, height * width
        found = images.flatten(2).unsqueeze(1).expand(shape).gather(3, pixels.expand(shape))
        if self.padding == "zeros":
            outside = (above.unsqueeze(-1) | beside.unsqueeze(-2)).flatten(2).unsqueeze(2)
            found = found.masked_fill(outside, 0.0)
        return found.reshape(-1, channels, height, width)

    def _line(self, moved: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Along one side: which pixel each position shows, and which positions are in the margin."""
        at = torch.arange(length, device=moved.device) + (moved - self.crop).unsqueeze(-1)
        outside = (at < 0) | (at >= length)
        last = length - 1
        return last - (last - at.abs()).abs(), outside  # mirrored at both ends


def used(augment: Augmentation | None) -> Augmentation | None:
    """None for one that does nothing, so that it costs nothing."""
    return augment if augment is not None and augment.changes else None


def of_every_view(values: Tensor, augment: Augmentation | None) -> Tensor:
    """One value per example as one per view, in the order of :meth:`Augmentation.apply`."""
    if augment is None:
        return values
    return values.unsqueeze(1).expand(-1, augment.views, *values.shape[1:]).flatten(0, 1)
