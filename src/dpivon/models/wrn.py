"""Wide residual networks with group normalisation and standardised weights (Zagoruyko and Komodakis, 2016; De et al., 2022, for
private training)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dpivon.models.standardised import StandardisedConv2d


class WideResNet(nn.Module):
    """WRN-d-k: three groups of (d − 4)/6 pre-activation blocks, k times as wide as a ResNet; GroupNorm mixes no examples.

    Args:
        depth: d, with d − 4 a multiple of 6.
        width: k.
        classes: logits that come out.
        in_channels: of the images.
        groups: of the normalisations.
        standardised: with False it is made of ordinary convolutions.
        base: channels of the first convolution, and of the first group at k = 1.
        relu_first: the order of De et al., which private training prefers: ReLU, then GroupNorm, also before the last mean, and
            a skip that changes the shape has a norm of its own. Otherwise norm, then ReLU. Their convolutions have a gain per
            output besides.
    """

    def __init__(
        self,
        depth: int = 16,
        width: int = 4,
        classes: int = 10,
        in_channels: int = 3,
        groups: int = 16,
        standardised: bool = True,
        base: int = 16,
        relu_first: bool = False,
    ) -> None:
        super().__init__()
        conv = StandardisedConv2d if standardised else nn.Conv2d
        blocks = (depth - 4) // 6
        channels = [base, base * width, 2 * base * width, 4 * base * width]
        self.stem = conv(in_channels, channels[0], 3, padding=1)
        layers: list[nn.Module] = []
        for i in range(3):
            for j in range(blocks):
                into = channels[i] if j == 0 else channels[i + 1]
                layers.append(Block(into, channels[i + 1], 2 if i and j == 0 else 1, groups, conv, relu_first))
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.GroupNorm(groups, channels[3])
        self.head = nn.Linear(channels[3], classes)
        self.relu_first = relu_first

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """What the last layer sees, [n, channels]."""
        return self.maps(x).mean((2, 3))

    def maps(self, x: Tensor) -> Tensor:
        """The same before the mean over places."""
        return _activated(self.blocks(self.stem(x)), self.norm, self.relu_first)


def _activated(x: Tensor, norm: nn.Module, relu_first: bool) -> Tensor:
    made: Tensor = norm(F.relu(x)) if relu_first else F.relu(norm(x))
    return made


class Block(nn.Module):
    def __init__(
        self, into: int, out: int, stride: int, groups: int, conv: type[nn.Conv2d], relu_first: bool = False
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(min(groups, into), into), nn.GroupNorm(groups, out)
        self.conv1 = conv(into, out, 3, stride, 1)
        self.conv2 = conv(out, out, 3, 1, 1)
        self.skip = conv(into, out, 1, stride) if into != out or stride != 1 else None
        self.relu_first = relu_first
        self.skip_norm = nn.GroupNorm(min(groups, into), into) if self.skip is not None and relu_first else None

    def forward(self, x: Tensor) -> Tensor:
        h = _activated(x, self.norm1, self.relu_first)
        skip = x
        if self.skip is not None:
            skip = self.skip(h if self.skip_norm is None else self.skip_norm(F.relu(x)))
        return skip + self.conv2(_activated(self.conv1(h), self.norm2, self.relu_first))
