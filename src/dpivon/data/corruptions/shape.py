"""What moves, merges or packs pixels."""

from __future__ import annotations

import io

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpivon.data.corruptions.blur import bell
from dpivon.errors import bad

SMALLER = (0.95, 0.9, 0.85, 0.75, 0.65)
# Shares of the side: how far pixels move, how smoothly, and how far the corners of a triangle do.
ELASTIC = ((0.0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))
QUALITY = (80, 65, 58, 50, 40)


def box(side: int, to: int) -> Tensor:
    """[to, side]: weights that resize by taking means of whole pixels, as Pillow's BOX filter does."""
    scale = side / to
    centres = (torch.arange(to, dtype=torch.float64) + 0.5)[:, None] * scale
    away = (torch.arange(side, dtype=torch.float64) + 0.5 - centres) / max(scale, 1.0)
    weights = ((away > -0.5) & (away <= 0.5)).double()
    return weights / weights.sum(1, keepdim=True)


def pixelate(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Smaller and back to its size."""
    side = x.shape[-1]
    small = max(1, int(side * SMALLER[severity]))
    there_and_back = (box(small, side) @ box(side, small)).to(x)
    return there_and_back @ x @ there_and_back.mT


def elastic_transform(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """A random affine map, and on top of it a smooth random field that moves every pixel."""
    n, _, side, _ = x.shape
    far, smooth, corner = (share * side for share in ELASTIC[severity])

    def uniform(*shape: int) -> Tensor:
        return 2 * torch.rand(shape, generator=generator, device=x.device) - 1

    # Three corners of the middle third go somewhere near; that fixes the affine map of every picture.
    centre, reach = side // 2, side // 3
    places = [(centre + reach, centre + reach), (centre + reach, centre - reach), (centre - reach, centre - reach)]
    corners = torch.tensor([(a, b, 1) for a, b in places], dtype=torch.float32, device=x.device)
    affine = torch.linalg.solve(corners, corners[:, :2] + corner * uniform(n, 3, 2))
    ticks = torch.arange(side, dtype=torch.float32, device=x.device)
    rows, columns = torch.meshgrid(ticks, ticks, indexing="ij")
    at = torch.stack([columns, rows, torch.ones_like(rows)], -1).flatten(0, 1) @ affine
    field = uniform(2 * n, 1, side, side)
    if radius := min(int(3 * smooth + 0.5), side - 1):
        weights = bell(smooth, radius).to(x)
        field = F.conv2d(F.pad(field, (radius, radius, 0, 0), mode="reflect"), weights.view(1, 1, 1, -1))
        field = F.conv2d(F.pad(field, (0, 0, radius, radius), mode="reflect"), weights.view(1, 1, -1, 1))
    at = at.view(n, side, side, 2) + far * field.view(n, 2, side, side).permute(0, 2, 3, 1)
    grid = (2 * at + 1) / side - 1  # from pixels to torch's [−1, 1], whose ends are the outer edges
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def jpeg_compression(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Packed by JPEG and unpacked again. Needs Pillow."""
    try:
        from PIL import Image
    except ImportError:
        fix = "Install pillow, or leave this corruption out"
        raise bad("name", "jpeg_compression", "needs Pillow, which is not installed", fix) from None
    pixels = x.clamp(0, 1).mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    out = np.empty_like(pixels)
    for i, picture in enumerate(pixels):
        packed = io.BytesIO()
        Image.fromarray(picture.squeeze(-1) if picture.shape[-1] == 1 else picture).save(
            packed, "JPEG", quality=QUALITY[severity]
        )
        out[i] = np.asarray(Image.open(packed)).reshape(picture.shape)
    return torch.from_numpy(out).permute(0, 3, 1, 2).to(x.device).float() / 255
