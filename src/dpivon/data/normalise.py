"""From bytes to what a network sees, by constants that owe nothing to the data.

The usual CIFAR-10 mean and standard deviation are statistics of the training set: using them releases them, and no
accountant knows. We take the centre of the byte range and half its half-width: (x/255 − .5)/.25, in [−2, 2]. It is
public, and close to the usual constants (.47 and .25), so nothing is lost by it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpivon.data.records import Images

#: What is subtracted from a pixel in [0, 1], and what it is then divided by: public constants, not statistics of any data.
MEAN = 0.5
#: See ``MEAN``.
STD = 0.25


def normalised(images: Images) -> tuple[Tensor, Tensor]:
    """(pixels [N, channels, H, W] in fp32, labels [N])."""
    pixels = torch.from_numpy(images.pixels.transpose(0, 3, 1, 2).astype("float32")).contiguous().div_(255.0)
    return pixels.sub_(MEAN).div_(STD), torch.from_numpy(images.labels.astype("int64"))
