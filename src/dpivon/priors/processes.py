"""Random image processes: what a network can be shown before it sees anyone's data.

Every process is a function ``(n, size, channels, generator) -> fields [n, channels, size, size]`` in floating point, of any
mean and scale, on the generator's device; :func:`images` turns fields into bytes. No constant is fitted to a data set. Most
follow from one demand: an image and its enlargement should look alike, since the distance to an object is arbitrary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

Process = Callable[[int, int, int, Generator], Tensor]

#: An image's smallest leaves, in pixels: from what a 3×3 kernel can see to a quarter of a 48×48 image across.
SMALLEST_LEAF = 1.5, 6.0
#: The largest, in sides of the image: its radius is half the image.
LARGEST_LEAF = 0.5
#: Enough leaves to hide most of the background, which is one more leaf.
LEAVES = 96
#: Images that share one random generator network: enough to fill a grouped convolution, few enough for many networks.
SHARED = 32
#: Feature maps of the random generator, and the side of its filters: one full period of the highest frequency at each scale.
MAPS, KERNEL = 12, 5
#: Numbers that all styles of an image are made of: fewer than maps, so that styles of different scales go together.
LATENT = 8
#: Atoms of a Gabor field; their number over two to one is drawn, so that some fields are sparse and some are dense.
ATOMS = 48
#: Points that a pen stroke goes through: the fewest between which it turns both ways, as an S does.
POINTS = 4
#: Dots per stretch between two of them, so that they are closer together than the thinnest pen is wide.
DOTS = 12
#: Radius of the pen, in sides of the image: lines are a tenth to a fifth of a letter's height wide.
PEN = 0.05, 0.1


def uniform(g: Generator, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniform draws between low and high."""
    return torch.rand(*shape, generator=g, device=g.device) * (high - low) + low


def normal(g: Generator, *shape: int) -> Tensor:
    """Standard normal draws."""
    return torch.randn(*shape, generator=g, device=g.device)


def standardised(x: Tensor) -> Tensor:
    """Every field of [..., H, W] with mean 0 and standard deviation 1; a constant field becomes 0."""
    x = x - x.mean((-2, -1), keepdim=True)
    return x / x.square().mean((-2, -1), keepdim=True).sqrt().clamp_min(1e-4)


def coloured(x: Tensor, g: Generator) -> Tensor:
    """Fields [n, channels, H, W] mixed so that channels agree by a random share: from grey to independent colours."""
    n, channels = x.shape[:2]
    share = uniform(g, n, 1, 1, 1)  # of the variance that all channels have in common
    common = x[:, :1] * share.sqrt()
    mixing = normal(g, n, channels, channels) / math.sqrt(channels)
    return common + torch.einsum("nij,njhw->nihw", mixing, x) * (1 - share).sqrt()


def spectra(n: int, size: int, channels: int, g: Generator) -> Tensor:
    """Gaussian fields with amplitude |f|⁻ᵃ in an oriented frequency.

    a = 1 has equal energy in every octave, the scale-invariant one; a from ½ to 2 goes from grainy to smooth. The two axes of
    the frequency are stretched by up to e^{±1.25}, a ratio of 12, at any angle.
    """
    a, angle = uniform(g, n, 1, 1, 1, low=0.5, high=2.0), uniform(g, n, 1, 1, 1, high=math.pi)
    stretch = uniform(g, n, 1, 1, 1, high=1.25).exp()
    u = torch.fft.fftfreq(size, device=g.device)[:, None]
    v = torch.fft.rfftfreq(size, device=g.device)[None]
    along, across = u * angle.cos() + v * angle.sin(), v * angle.cos() - u * angle.sin()
    f = ((along * stretch).square() + (across / stretch).square()).sqrt().clamp_min(0.5 / size)
    spectrum = torch.fft.rfft2(normal(g, n, channels, size, size)) * f**-a
    return coloured(standardised(torch.fft.irfft2(spectrum, s=(size, size))), g)


def grid(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns of the pixels' centres, in pixels."""
    line = torch.arange(size, device=device) + 0.5
    return line[:, None].expand(size, size), line[None].expand(size, size)


def gabor(n: int, size: int, channels: int, g: Generator) -> Tensor:
    """Sums of Gabor atoms: waves of any direction and colour under a Gaussian window.

    Frequencies are log-uniform from one period per image to one in three pixels (scale invariance). The window's width is .56
    of a period, at which an atom spans one octave. Amplitudes are Laplacian, so that few atoms stand out.
    """
    y, x = grid(size, g.device)
    field = torch.zeros(n, channels, size, size, device=g.device)
    kept = uniform(g, n, low=0.5)  # share of the atoms that an image has
    for _ in range(ATOMS):
        f = torch.exp(uniform(g, n, 1, 1, low=-math.log(size), high=-math.log(3.0)))
        angle, phase = uniform(g, n, 1, 1, high=math.pi), uniform(g, n, 1, 1, high=2 * math.pi)
        dy, dx = y - uniform(g, n, 1, 1, high=size), x - uniform(g, n, 1, 1, high=size)
        along = dx * angle.cos() + dy * angle.sin()
        window = torch.exp(-0.5 * (dx.square() + dy.square()) * (f / 0.56).square())
        wave = window * torch.cos(2 * math.pi * f * along + phase)
        there = (uniform(g, n) < kept).float()
        amplitude = -uniform(g, n, low=1e-6).log() * there
        field += wave.unsqueeze(1) * (coloured(normal(g, n, channels, 1, 1), g) * amplitude.view(n, 1, 1, 1))
    return field


def wavelets(networks: int, outputs: int, inputs: int, g: Generator) -> Tensor:
    """Filters [networks·outputs, inputs, KERNEL, KERNEL], each one oriented wavelet at random weights of its inputs.

    Frequencies go from constant to Nyquist. Input weights are Student-t with 3 degrees of freedom, the fewest with a finite
    variance: most outputs listen to few inputs.
    """
    y, x = grid(KERNEL, g.device)
    y, x = y - KERNEL / 2, x - KERNEL / 2
    count = networks * outputs
    f, angle = uniform(g, count, 1, 1, high=0.5), uniform(g, count, 1, 1, high=math.pi)
    phase, width = uniform(g, count, 1, 1, high=2 * math.pi), uniform(g, count, 1, 1, low=0.5, high=KERNEL / 3)
    wave = torch.cos(2 * math.pi * f * (x * angle.cos() + y * angle.sin()) + phase)
    wave = wave * torch.exp(-0.5 * (x.square() + y.square()) / width.square())
    wave = wave / wave.square().sum((-2, -1), keepdim=True).sqrt().clamp_min(1e-4)
    weights = normal(g, count, inputs) / (normal(g, 3, count, inputs).square().mean(0).sqrt() + 1e-3)
    return weights[:, :, None, None] * wave[:, None]


def filters(n: int, size: int, channels: int, g: Generator) -> Tensor:
    """Images of untrained generators: noise through random wavelets, from 4×4 up to the image, octave by octave.

    At every scale: enlarge, add noise, filter, normalise, weight the maps by the image's own style, rectify. A group of
    ``SHARED`` images has one network. Styles are log-normal with width 1, so that an image is ruled by few of the maps; so are
    the scales' shares of the image, which is the sum of what all scales paint.
    """
    networks = -(-n // SHARED)
    x = normal(g, SHARED, networks * MAPS, 4, 4)
    painted = torch.zeros(networks * SHARED, channels, 4, 4, device=g.device)
    sides = [4]
    while sides[-1] < size:
        sides.append(min(2 * sides[-1], size))
    for side in sides:
        if side != x.shape[-1]:
            x, painted = (
                F.interpolate(t, size=(side, side), mode="bilinear", align_corners=False) for t in (x, painted)
            )
        strength = uniform(g, 1, networks * MAPS, 1, 1).square()  # of fresh noise beside what came from below
        x = x + normal(g, *x.shape) * strength
        padded = F.pad(x, (KERNEL // 2,) * 4, mode="reflect")
        x = standardised(F.conv2d(padded, wavelets(networks, MAPS, MAPS, g), groups=networks))
        x = F.leaky_relu(x + normal(g, SHARED, networks * MAPS, 1, 1) * 0.5, 0.2)
        x = x * normal(g, SHARED, networks * MAPS, 1, 1).exp()
        maps = x.view(SHARED, networks, MAPS, side, side).transpose(0, 1).flatten(0, 1)
        paint = torch.einsum("ncm,nmhw->nchw", normal(g, len(maps), channels, MAPS), maps)
        painted = painted + standardised(paint) * normal(g, len(maps), 1, 1, 1).exp()
    return coloured(standardised(painted[:n]), g)


def styled(n: int, size: int, channels: int, g: Generator) -> Tensor:
    """Images of untrained style generators (Karras et al., 2020): a layout that a network's images share, painted in styles.

    Where :func:`filters` begins with noise, this begins with a constant of the network, turned by the image's own part. Every
    scale has two rounds of: weight the maps by the style, filter, divide by what the weights give on average, add one noise
    field at the maps' own strengths, shift, rectify. Styles are 1 + N(0, 1), linear in ``LATENT`` numbers of the image. What a
    scale paints is weaker than what the one before did, by a factor of the network from 1 (scale invariance) to exp(−.6).
    """
    networks = -(-n // SHARED)
    maps = networks * MAPS
    latent = normal(g, SHARED, networks, LATENT) / math.sqrt(LATENT)

    def style() -> Tensor:  # [SHARED, networks, MAPS]
        return 1 + torch.einsum("snl,nml->snm", latent, normal(g, networks, MAPS, LATENT))

    own = uniform(g, 1, networks, 1, 1, 1).expand(1, networks, MAPS, 1, 1).reshape(1, maps, 1, 1)
    x = normal(g, 1, maps, 4, 4) * (1 - own).sqrt() + normal(g, SHARED, maps, 4, 4) * own.sqrt()
    painted = torch.zeros(SHARED, networks * channels, 4, 4, device=g.device)
    weaker = uniform(g, 1, networks, 1, 1, 1, high=0.6)
    sides = [4]
    while sides[-1] < size:
        sides.append(min(2 * sides[-1], size))
    for octave, side in enumerate(sides):
        if side != x.shape[-1]:
            x, painted = (
                F.interpolate(t, size=(side, side), mode="bilinear", align_corners=False) for t in (x, painted)
            )
        for _ in range(2):
            s, w = style(), wavelets(networks, MAPS, MAPS, g)
            power = w.square().sum((2, 3)).view(networks, MAPS, MAPS)  # of output by input
            scale = torch.einsum("noi,sni->sno", power, s.square()).clamp_min(1e-4).rsqrt()
            padded = F.pad(x * s.reshape(SHARED, maps, 1, 1), (KERNEL // 2,) * 4, mode="reflect")
            x = F.conv2d(padded, w, groups=networks) * scale.reshape(SHARED, maps, 1, 1)
            noise = normal(g, SHARED, networks, 1, side, side) * uniform(g, 1, networks, MAPS, 1, 1).pow(3)
            x = x + noise.reshape(SHARED, maps, side, side) + normal(g, 1, maps, 1, 1) * 0.5
            x = F.leaky_relu(x, 0.2)
            x = x / x.square().mean((0, 2, 3), keepdim=True).sqrt().clamp_min(1e-4)
        paint = normal(g, networks, channels, MAPS)
        seen = (x * style().reshape(SHARED, maps, 1, 1)).view(SHARED, networks, MAPS, side, side)
        colour = torch.einsum("ncm,snmhw->snchw", paint, seen).reshape(SHARED, networks * channels, side, side)
        share = (normal(g, 1, networks, 1, 1, 1) - octave * weaker).exp().expand(1, networks, channels, 1, 1)
        painted = painted + colour * share.reshape(1, networks * channels, 1, 1)
    whole = painted.view(SHARED, networks, channels, size, size).transpose(0, 1).flatten(0, 1)
    return coloured(standardised(whole[:n]), g)


def leaves(n: int, size: int, channels: int, g: Generator, texture: Process = spectra) -> Tensor:
    """Dead leaves: opaque shapes that fall on one another, each with its colour, texture and shading.

    Radii have density r⁻³, the one for which the image is scale invariant (Lee, Mumford and Huang, 2001). Shapes are
    superellipses, from diamonds to rectangles, with a wavy outline.
    """
    y, x = grid(size, g.device)
    k, largest = LEAVES, LARGEST_LEAF * size
    least, most = SMALLEST_LEAF
    smallest = least * (most / least) ** uniform(g, n, 1, 1)  # log-uniform: how far away everything is
    radius = (largest**-2 + uniform(g, k, n, 1, 1) * (smallest**-2 - largest**-2)).rsqrt()
    # A large leaf may have its centre outside of the image.
    at = [uniform(g, k, n, 1, 1) * (size + 2 * radius) - radius for _ in range(2)]
    angle, stretch = uniform(g, k, n, 1, 1, high=math.pi), (normal(g, k, n, 1, 1) * 0.4).exp()
    power = torch.exp2(uniform(g, k, n, 1, 1, high=3.0))  # 1 a diamond, 2 an ellipse, 8 nearly a rectangle
    waves = torch.randint(2, 7, (k, n, 1, 1), generator=g, device=g.device)
    depth, phase = uniform(g, k, n, 1, 1, high=0.3), uniform(g, k, n, 1, 1, high=2 * math.pi)
    top = torch.zeros(n, size, size, dtype=torch.int64, device=g.device)  # 0 is the background
    for j in range(k):
        dy, dx = y - at[0][j], x - at[1][j]
        c, s = angle[j].cos(), angle[j].sin()
        a, b = (dx * c + dy * s) / stretch[j], (dy * c - dx * s) * stretch[j]
        edge = radius[j] * (1 + depth[j] * torch.cos(waves[j] * torch.atan2(b, a) + phase[j]))
        inside = (a.abs() / edge) ** power[j] + (b.abs() / edge) ** power[j] < 1
        top = torch.where(inside, j + 1, top)
    return _painted(top, k + 1, channels, g, texture)


def _painted(top: Tensor, leaves_: int, channels: int, g: Generator, texture: Process) -> Tensor:
    """What is seen where leaf ``top`` lies on top: its colour, two textures at its own weights, and a slope of light."""
    n, size, _ = top.shape
    y, x = grid(size, g.device)
    fields = [texture(n, size, channels, g) for _ in range(2)]

    def of_leaf(values: Tensor) -> Tensor:  # [n, leaves, channels] by pixel
        index = top.flatten(1).unsqueeze(2).expand(-1, -1, values.shape[2])
        return values.gather(1, index).transpose(1, 2).reshape(n, values.shape[2], size, size)

    flat = coloured(normal(g, n * leaves_, channels, 1, 1), g).view(n, leaves_, channels)
    image = of_leaf(flat)
    for field in fields:
        # Squared: many leaves are nearly plain, as large as the contrast between leaves at most.
        image = image + standardised(field) * of_leaf(uniform(g, n, leaves_, 1).square())
    slope = of_leaf(normal(g, n, leaves_, 2)) * 0.5  # over the whole image, half of the contrast between leaves
    return image + slope[:, :1] * (y / size - 0.5) + slope[:, 1:] * (x / size - 0.5)


def collage(n: int, size: int, channels: int, g: Generator) -> Tensor:
    """Dead leaves whose textures are images of random generators."""
    return leaves(n, size, channels, g, texture=filters)


def objects(n: int, size: int, channels: int, g: Generator) -> Tensor:
    """Dead leaves whose textures are images of style generators."""
    return leaves(n, size, channels, g, texture=styled)


def strokes(n: int, size: int, channels: int, g: Generator) -> Tensor:
    """Made-up letters: one or two smooth pen strokes through random points, enlarged to fill the image.

    Knowledge about handwriting in general and of no data set. A stroke is a Catmull-Rom spline through ``POINTS`` points of
    a square. All channels have the same ink, and the line's edge is one pixel wide.
    """
    points = uniform(g, n, 2, POINTS, 2)
    points[:, 1] = torch.where(uniform(g, n, 1, 1) < 0.5, points[:, 1], points[:, 0])  # half have one stroke
    ends = 2 * points[:, :, :1] - points[:, :, 1:2], 2 * points[:, :, -1:] - points[:, :, -2:-1]
    a, b, c, d = torch.cat([ends[0], points, ends[1]], 2).unsqueeze(3).unfold(2, 4, 1).unbind(-1)
    t = torch.linspace(0, 1, DOTS + 1, device=g.device).view(-1, 1)
    dots = b + 0.5 * t * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a)))
    dots = dots.flatten(1, 3)
    low, high = dots.amin(1, keepdim=True), dots.amax(1, keepdim=True)
    room = (1 - 2 * PEN[1]) / (high - low).amax(2, keepdim=True).clamp_min(0.1)
    at = (dots - (low + high) / 2) * room + 0.5
    y, x = (line / size for line in grid(size, g.device))
    nearest = torch.full((n, size, size), math.inf, device=g.device)
    for dot in at.unbind(1):
        across, down = x - dot[:, 0].view(n, 1, 1), y - dot[:, 1].view(n, 1, 1)
        nearest = torch.minimum(nearest, across.square() + down.square())
    radius = uniform(g, n, 1, 1, low=PEN[0], high=PEN[1])
    ink = ((radius - nearest.sqrt()) * size + 0.5).clamp(0, 1)
    return ink.unsqueeze(1).expand(n, channels, size, size)


PROCESSES: dict[str, Process] = {
    "spectra": spectra,
    "gabor": gabor,
    "filters": filters,
    "leaves": leaves,
    "collage": collage,
    "styled": styled,
    "objects": objects,
    "strokes": strokes,
}
#: What a prior is learned from: processes in equal shares.
MIXTURES: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in PROCESSES},
    "mixture": ("leaves", "filters", "collage", "gabor"),
    # Mostly the process that was best alone, and its images as objects that hide one another.
    "varied": ("filters", "filters", "filters", "collage"),
    # Both kinds of generators, and objects.
    "generators": ("styled", "styled", "filters", "objects"),
}


def images(mixture: str, n: int, g: Generator, size: int = 48, channels: int = 3) -> Tensor:
    """n images [n, channels, size, size] in bytes, from the named process or mixture, in random order.

    Brightness and contrast are drawn around .5 and .25, the public constants that inputs are normalised by.
    """
    names = MIXTURES[mixture]
    shares = [n // len(names) + (i < n % len(names)) for i in range(len(names))]
    fields = torch.cat([PROCESSES[name](share, size, channels, g) for name, share in zip(names, shares, strict=True)])
    fields = fields - fields.mean((1, 2, 3), keepdim=True)
    fields = fields / fields.square().mean((1, 2, 3), keepdim=True).sqrt().clamp_min(1e-4)
    contrast, brightness = uniform(g, n, 1, 1, 1, low=0.5, high=1.5), normal(g, n, 1, 1, 1) * 0.5
    x = 0.5 + 0.25 * (fields * contrast + brightness)
    order = torch.randperm(n, generator=g, device=g.device)
    return (x.clamp(0, 1) * 255).round().byte()[order]
