"""Light: brighter, flatter, or through fog."""

from __future__ import annotations

import torch
from torch import Tensor

BRIGHTER = (0.05, 0.1, 0.15, 0.2, 0.3)
CONTRAST = (0.75, 0.5, 0.4, 0.3, 0.15)
FOG = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))  # thickness, how fast its detail fades


def brightness(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """The value of HSV, which is the largest channel, rises; hue and saturation stay."""
    value = x.amax(1, keepdim=True)
    raised = (value + BRIGHTER[severity]).clamp(max=1)
    return torch.where(value > 0, x * (raised / value.clamp_min(1e-12)), raised)


def contrast(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Every channel of a picture moves towards its mean."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * CONTRAST[severity] + mean


def fog(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """A cloud laid over the picture, and the whole scaled back to the range it had."""
    thickness, fade = FOG[severity]
    side = x.shape[-1]
    clouds = plasma(len(x), 1 << (side - 1).bit_length(), fade, generator)[:, None, :side, :side]
    top = x.amax((1, 2, 3), keepdim=True)
    return (x + thickness * clouds.to(x)) * top / (top + thickness)


def plasma(n: int, side: int, fade: float, generator: torch.Generator) -> Tensor:
    """n clouds of side × side in [0, 1] by the diamond–square algorithm on a torus.

    Fournier, Fussell and Carpenter, 1982: midpoints are means of their four neighbours, displaced by less and less.
    """
    device = generator.device
    cloud = torch.zeros(n, side, side, device=device)
    step, wobble = side, 100.0

    def displaced(total: Tensor) -> Tensor:
        return total / 4 + wobble**2 * (2 * torch.rand(total.shape, generator=generator, device=device) - 1)

    while step >= 2:
        half = step // 2
        corners = cloud[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        cloud[:, half::step, half::step] = displaced(pairs + pairs.roll(-1, 2))
        middles = cloud[:, half::step, half::step]
        cloud[:, ::step, half::step] = displaced(middles + middles.roll(1, 1) + corners + corners.roll(-1, 2))
        cloud[:, half::step, ::step] = displaced(middles + middles.roll(1, 2) + corners + corners.roll(-1, 1))
        step, wobble = half, wobble / fade
    low, high = cloud.amin((1, 2), keepdim=True), cloud.amax((1, 2), keepdim=True)
    return (cloud - low) / (high - low).clamp_min(1e-12)
