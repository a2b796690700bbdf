"""Corrupted images for distribution shift, in five severities, after the recipe of CIFAR-10-C.

Hendrycks and Dietterich, *Benchmarking Neural Network Robustness to Common Corruptions and Perturbations*, 2019
(arXiv:1903.12261), with their constants for images of 32×32. They are generated here with torch alone (and Pillow for JPEG):
they are not the published files, so numbers are comparable within these experiments and not with papers on CIFAR-10-C.
:data:`COMMON` are its fifteen, with one difference in kind: frost is laid over an image from photographs there, and here from
a random texture of our own, hence ``synthetic_frost``. ``gaussian_blur`` is one of its four further ones.

Everything random follows a public seed, the corruption's name and its severity. Results are bytes, as in the published
files.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpivon.errors import bad, check_choice, check_whole

#: The severities, from the mildest. Each constant below has one value per severity; functions count severities from 0.
SEVERITIES = (1, 2, 3, 4, 5)
NOISE_STD = (0.04, 0.06, 0.08, 0.09, 0.10)
PHOTONS = (500, 250, 100, 75, 50)
IMPULSES = (0.01, 0.02, 0.03, 0.05, 0.07)
BLUR_STD = (0.4, 0.6, 0.7, 0.8, 1.0)
DISK = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))  # radius, σ of what smooths its edge
BRIGHTER = (0.05, 0.1, 0.15, 0.2, 0.3)
CONTRAST = (0.75, 0.5, 0.4, 0.3, 0.15)
FOG = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))  # thickness, how fast its detail fades
SMALLER = (0.95, 0.9, 0.85, 0.75, 0.65)
# Shares of the side: how far pixels move, how smoothly, and how far the corners of a triangle do.
ELASTIC = ((0.0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))
QUALITY = (80, 65, 58, 50, 40)
GLASS = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))  # σ of a blur before and after, how often pixels move
MOTION = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))  # radius, σ
ZOOM = (1.06, 1.11, 1.16, 1.21, 1.26)
# Mean and σ of the flakes, how much they are enlarged, from where on they show, radius and σ of their fall, share of the image.
SNOW = (
    (0.1, 0.2, 1.0, 0.6, 8, 3.0, 0.95),
    (0.1, 0.2, 1.0, 0.5, 10, 4.0, 0.9),
    (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.9),
    (0.25, 0.3, 2.25, 0.6, 12, 6.0, 0.85),
    (0.3, 0.3, 1.25, 0.65, 14, 12.0, 0.8),
)
FROST = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))  # share of the image, share of the frost

Corruption = Callable[[Tensor, int, torch.Generator], Tensor]


def corrupt(images: Tensor, name: str, severity: int, *, seed: int = 0) -> Tensor:
    """``images`` [N, channels, H, W] in [0, 1], corrupted: bytes of the same shape, on the same device."""
    check_choice("name", name, tuple(CORRUPTIONS), "Name a corruption")
    check_whole("severity", severity, "Give a severity from 1 to 5", at_least=1)
    if severity > SEVERITIES[-1]:
        raise bad("severity", severity, "is more than 5", "Give a severity from 1 to 5")
    if images.ndim != 4 or images.shape[1] not in (1, 3) or images.shape[2] != images.shape[3]:
        fix = "Give square images as [N, channels, H, W] with one or three channels"
        raise bad("images.shape", tuple(images.shape), "is not that of images", fix)
    low, high = (float(v) for v in images.aminmax()) if images.numel() else (0.0, 0.0)
    if not images.is_floating_point() or not (low >= 0 and high <= 1):
        problem = f"holds {images.dtype} from {low:g} to {high:g}"
        raise bad("images", tuple(images.shape), problem, "Give numbers from 0 to 1, before any normalisation")
    words = hashlib.sha256(f"{name}|{severity}|{seed}".encode()).digest()
    generator = torch.Generator(images.device).manual_seed(int.from_bytes(words[:7], "big"))
    return as_bytes(CORRUPTIONS[name](images.float(), severity - 1, generator))


def as_bytes(images: Tensor) -> Tensor:
    """From [0, 1] to the nearest byte; what lies outside is cut off."""
    return images.clamp(0, 1).mul(255).round().to(torch.uint8)


def gaussian_noise(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """N(0, s²) added to every value."""
    return x + NOISE_STD[severity] * torch.randn(x.shape, generator=generator, device=x.device)


def shot_noise(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Poisson(c·x)/c: at most c photons per value."""
    return torch.poisson(x * PHOTONS[severity], generator) / PHOTONS[severity]


def impulse_noise(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """A share of all values becomes 0 or 1, each half the time."""
    draw = torch.rand(x.shape, generator=generator, device=x.device)
    share = IMPULSES[severity]
    return torch.where(draw < share / 2, 0.0, torch.where(draw < share, 1.0, x))


def bell(sigma: float, radius: int) -> Tensor:
    """A Gaussian on 2·radius + 1 points that sums to 1."""
    points = torch.arange(-radius, radius + 1, dtype=torch.float64)
    weights = torch.exp(-points.square() / (2 * sigma**2)) if sigma > 0 else (points == 0).double()
    return weights / weights.sum()


def disk(radius: float, smooth: float) -> Tensor:
    """Points within the radius, of equal weight, with an edge smoothed by a Gaussian of 3×3."""
    size = int(radius) + 1
    points = torch.arange(-size, size + 1, dtype=torch.float64)
    inside = (points[:, None].square() + points.square() <= radius**2).double()
    soft = bell(smooth, 1)
    return F.conv2d((inside / inside.sum())[None, None], torch.outer(soft, soft)[None, None], padding=1)[0, 0]


def filtered(x: Tensor, kernel: Tensor, border: str) -> Tensor:
    """Every channel of every image under one kernel; ``border`` is torch's word for what lies outside."""
    n, channels, height, width = x.shape
    around = kernel.shape[0] // 2
    wide = F.pad(x, (around,) * 4, mode=border).reshape(n * channels, 1, height + 2 * around, width + 2 * around)
    return F.conv2d(wide, kernel.to(x)[None, None]).reshape(x.shape)


def blurred(x: Tensor, sigma: float) -> Tensor:
    weights = bell(sigma, int(4 * sigma + 0.5))
    return filtered(x, torch.outer(weights, weights), "replicate")


def gaussian_blur(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    return blurred(x, BLUR_STD[severity])


def glass_blur(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Every pixel takes its own colour or that of a neighbour above or to its left, but in the first two rows and columns.

    The recipe says that two pixels change places; what made the published files copies, and so do we.
    """
    sigma, times = GLASS[severity]
    x, (n, channels, side, _) = as_bytes(blurred(x, sigma)).float() / 255, x.shape
    places = torch.arange(side, device=x.device)
    for _ in range(times):
        back = torch.randint(0, 2, (2, n, side, side), generator=generator, device=x.device)
        back[:, :, :2], back[:, :, :, :2] = 0, 0
        at = (places[:, None] - back[0]) * side + places - back[1]
        x = x.flatten(2).gather(2, at.flatten(1)[:, None].expand(-1, channels, -1)).view_as(x)
    return blurred(x, sigma)


def moved(x: Tensor, radius: int, sigma: float, degrees: Tensor) -> Tensor:
    """Every image under half a Gaussian along a direction of its own, in whole pixels, as ImageMagick's motion blur."""
    channels, side = x.shape[1:3]
    weights = bell(sigma, 2 * radius)[2 * radius :]
    across, down = degrees.deg2rad().cos(), degrees.deg2rad().sin()
    places, flat, total = torch.arange(side, device=x.device), x.flatten(2), torch.zeros_like(x).flatten(2)
    for i, weight in enumerate((weights / weights.sum()).tolist()):
        columns, rows = ((places + (i * d - 0.5).ceil().long()[:, None]).clamp(0, side - 1) for d in (across, down))
        at = (rows[:, :, None] * side + columns[:, None]).flatten(1)[:, None]
        total += weight * flat.gather(2, at.expand(-1, channels, -1))
    return total.view_as(x)


def directions(n: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(n, generator=generator, device=generator.device)


def motion_blur(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    return moved(x, *MOTION[severity], directions(len(x), -45, 45, generator))


def enlarged(side: int, factor: float) -> Tensor:
    """[side, side]: weights that enlarge the middle to the whole, linear between pixels, as SciPy's zoom does."""
    crop = int(np.ceil(side / factor))
    size = round(crop * factor)
    at = (torch.arange(side, dtype=torch.float64) + (size - side) // 2) * ((crop - 1) / max(size - 1, 1))
    away = (at[:, None] - torch.arange(crop)).abs()
    top = (side - crop) // 2
    return F.pad((1 - away).clamp_min(0), (top, side - crop - top))


def zoom_blur(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """The mean of the image and of its middle, ever more enlarged."""
    total, factors = x, np.arange(1, ZOOM[severity], 0.01)
    for factor in factors:
        weights = enlarged(x.shape[-1], float(factor)).to(x)
        total = total + weights @ x @ weights.mT
    return total / (len(factors) + 1)


def snow(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Falling flakes, and the same turned by half a circle, over an image that is paler."""
    mean, std, larger, shown, radius, sigma, share = SNOW[severity]
    n, _, side, _ = x.shape
    weights = enlarged(side, larger).to(x)
    layer = weights @ (mean + std * torch.randn(n, 1, side, side, generator=generator, device=x.device)) @ weights.mT
    layer = layer.where(layer >= shown, 0.0).clamp(0, 1)
    layer = moved(layer, radius, sigma, directions(n, -135, -45, generator))
    grey = x if x.shape[1] == 1 else (x * x.new_tensor((0.299, 0.587, 0.114)).view(3, 1, 1)).sum(1, keepdim=True)
    return share * x + (1 - share) * torch.maximum(x, 1.5 * grey + 0.5) + layer + layer.flip(2, 3)


def synthetic_frost(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Pale blue ridges of a random texture, weighed as the recipe weighs its photographs of frost."""
    keep, share = FROST[severity]
    n, channels, side, _ = x.shape
    clouds = plasma(n, 1 << (side - 1).bit_length(), 1.75, generator)[:, None, :side, :side].to(x)
    frost = 0.3 + 0.7 * (1 - (2 * clouds - 1).abs()).square()
    tint = x.new_tensor((0.88, 0.95, 1.0) if channels == 3 else (0.94,)).view(channels, 1, 1)
    return keep * x + share * tint * frost


def defocus_blur(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """A point becomes a small disk."""
    return filtered(x, disk(*DISK[severity]), "reflect")


def brightness(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """The value of HSV, which is the largest channel, rises; hue and saturation stay."""
    value = x.amax(1, keepdim=True)
    raised = (value + BRIGHTER[severity]).clamp(max=1)
    return torch.where(value > 0, x * (raised / value.clamp_min(1e-12)), raised)


def contrast(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Every channel of an image moves towards its mean."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * CONTRAST[severity] + mean


def fog(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """A cloud laid over the image, and the whole scaled back to the range it had."""
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

    # Three corners of the middle third go somewhere near; that fixes the affine map of every image.
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
    pixels = as_bytes(x).permute(0, 2, 3, 1).cpu().numpy()
    out = np.empty_like(pixels)
    for i, image in enumerate(pixels):
        packed = io.BytesIO()
        Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(
            packed, "JPEG", quality=QUALITY[severity]
        )
        out[i] = np.asarray(Image.open(packed)).reshape(image.shape)
    return torch.from_numpy(out).permute(0, 3, 1, 2).to(x.device).float() / 255


_ALL: tuple[Corruption, ...] = (
    gaussian_noise, shot_noise, impulse_noise, gaussian_blur, defocus_blur, glass_blur, motion_blur, zoom_blur, snow,
    synthetic_frost, fog, brightness, contrast, elastic_transform, pixelate, jpeg_compression,
)  # fmt: skip
#: The corruptions by their names in CIFAR-10-C, but for the frost.
CORRUPTIONS: dict[str, Corruption] = {function.__name__: function for function in _ALL}
#: The fifteen that CIFAR-10-C's means are over.
COMMON = tuple(name for name in CORRUPTIONS if name != "gaussian_blur")

__all__ = ["COMMON", "CORRUPTIONS", "SEVERITIES", "as_bytes", "corrupt"]
