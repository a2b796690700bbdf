"""Corruptions do what their constants say: closed forms where there are any, Pillow and SciPy elsewhere."""

from __future__ import annotations

import io
import math
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from experiments.robustness import corruptions
from experiments.robustness.corruptions import CORRUPTIONS, SEVERITIES, as_bytes, corrupt

from dpivon.errors import ArgumentError

Image = pytest.importorskip("PIL.Image")


FIXED_BLURS = ("gaussian_blur", "defocus_blur", "zoom_blur")
# As elastic bends more, its recipe shifts less; glass moves pixels once or twice; frost hides an image while it brightens it.
NOT_FARTHER = ("elastic_transform", "glass_blur", "synthetic_frost")


def smooth(n=40, channels=3, side=32, seed=0):
    """Pictures with structure at several scales, in [0, 1] and on whole bytes, away from both ends."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, channels, side // 4, side // 4, generator=generator)
    x = torch.nn.functional.interpolate(coarse, (side, side), mode="bilinear", align_corners=False)
    x = 0.25 + 0.5 * (x + 0.2 * torch.rand(n, channels, side, side, generator=generator)).clamp(0, 1)
    return as_bytes(x).float() / 255


def grey(value=0.5, n=60, side=32):
    return torch.full((n, 3, side, side), value)


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize(("channels", "side"), [(3, 32), (1, 28), (1, 8)])
def test_bytes_of_the_same_shape_that_follow_the_seed_alone(name, channels, side):
    x = smooth(6, channels, side)
    before = x.clone()
    torch.manual_seed(1)
    first = corrupt(x, name, 3, seed=4)
    torch.manual_seed(2)
    again = corrupt(x, name, 3, seed=4)
    assert first.dtype == torch.uint8
    assert first.shape == x.shape
    assert torch.equal(first, again)  # the global generator has no say
    assert torch.equal(x, before)
    assert not torch.equal(first, as_bytes(x))
    random = name not in (*FIXED_BLURS, "brightness", "contrast", "pixelate", "jpeg_compression")
    assert torch.equal(first, corrupt(x, name, 3, seed=5)) is not random
    if random:
        with_others = corrupt(torch.cat([x[:1], x[:1]]), name, 3, seed=4)
        assert not torch.equal(with_others[0], with_others[1])  # every picture its own draw


@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name not in NOT_FARTHER])
def test_every_severity_is_worse_than_the_last(name):
    """In distance from the clean image."""
    x = smooth()
    far = [float((corrupt(x, name, s).float() / 255 - x).square().mean().sqrt()) for s in SEVERITIES]
    assert far[0] > 0
    assert all(a < b for a, b in pairwise(far)), far


def test_noise_has_the_variance_that_its_constant_says():
    x = grey()
    n = x.numel()
    for s in SEVERITIES:
        std = corruptions.NOISE_STD[s - 1]
        y = corrupt(x, "gaussian_noise", s).double() / 255
        expected = math.sqrt(std**2 + (1 / 255) ** 2 / 12)  # of the noise and of rounding to bytes
        assert float(y.std()) == pytest.approx(expected, abs=5 * expected / math.sqrt(2 * n))
        y = corruptions.shot_noise(x, s - 1, torch.Generator().manual_seed(0)).double()
        expected = math.sqrt(0.5 / corruptions.PHOTONS[s - 1])  # Var[Poisson(cx)/c] = x/c
        assert float(y.std()) == pytest.approx(expected, abs=5 * expected / math.sqrt(2 * n))
        assert float(y.mean()) == pytest.approx(0.5, abs=5 * expected / math.sqrt(n))
        share = corruptions.IMPULSES[s - 1]
        y = corrupt(x, "impulse_noise", s)
        error = 5 * math.sqrt(share / n)
        assert float((y == 0).double().mean()) == pytest.approx(share / 2, abs=error)
        assert float((y == 255).double().mean()) == pytest.approx(share / 2, abs=error)


def test_blurs_keep_the_sum_and_spread_a_point_as_far_as_their_kernel():
    point = torch.zeros(1, 1, 33, 33)
    point[0, 0, 16, 16] = 1
    ticks = torch.arange(33) - 16.0
    for s in range(5):
        y = corruptions.gaussian_blur(point, s, torch.Generator())
        assert float(y.sum()) == pytest.approx(1, abs=1e-5)
        weights = corruptions.bell(corruptions.BLUR_STD[s], 8)
        radius = int(4 * corruptions.BLUR_STD[s] + 0.5)
        inside = weights[8 - radius : 9 + radius] / weights[8 - radius : 9 + radius].sum()
        torch.testing.assert_close(y[0, 0, 16, 16 - radius : 17 + radius].double(), inside * inside[radius])
        kernel = corruptions.disk(*corruptions.DISK[s])
        assert float(kernel.sum()) == pytest.approx(1)
        y = corruptions.defocus_blur(point, s, torch.Generator())
        soft = corruptions.bell(corruptions.DISK[s][1], 1)
        across = {0.3: 0.0, 0.4: 0.0, 0.5: 0.0, 1.0: 0.4, 1.5: 6 / 9}[
            corruptions.DISK[s][0]
        ]  # Var of x on the disk's points
        assert float((y[0, 0].sum(0) * ticks**2).sum()) == pytest.approx(across + 2 * float(soft[0]), abs=1e-4)
        assert torch.allclose(corruptions.defocus_blur(grey(0.3, 1), s, torch.Generator()), grey(0.3, 1), atol=1e-6)


def test_gaussian_blur_is_scipys():
    ndimage = pytest.importorskip("scipy.ndimage")
    x = smooth(2)
    for s in range(5):
        std = corruptions.BLUR_STD[s]
        expected = ndimage.gaussian_filter(x.numpy(), (0, 0, std, std), mode="nearest", truncate=4)
        torch.testing.assert_close(corruptions.gaussian_blur(x, s, torch.Generator()), torch.from_numpy(expected))


def test_brightness_moves_value_and_nothing_else_and_contrast_scales_deviations():
    import colorsys

    x = smooth(2, side=8)
    for s in range(5):
        y = corruptions.brightness(x, s, torch.Generator())
        for before, after in zip(
            x.permute(0, 2, 3, 1).reshape(-1, 3), y.permute(0, 2, 3, 1).reshape(-1, 3), strict=True
        ):
            h, saturation, v = colorsys.rgb_to_hsv(*before.tolist())
            expected = colorsys.hsv_to_rgb(h, saturation, min(1, v + corruptions.BRIGHTER[s]))
            assert after.tolist() == pytest.approx(expected, abs=1e-5)
        y = corruptions.contrast(x, s, torch.Generator())
        torch.testing.assert_close(y.std((2, 3)), corruptions.CONTRAST[s] * x.std((2, 3)))
        torch.testing.assert_close(y.mean((2, 3)), x.mean((2, 3)))
    assert torch.equal(
        corruptions.brightness(torch.zeros(1, 3, 2, 2), 4, torch.Generator()), torch.full((1, 3, 2, 2), 0.3)
    )


def test_fog_is_a_cloud_in_front_of_the_picture():
    generator = torch.Generator().manual_seed(0)
    clouds = corruptions.plasma(200, 32, 2.0, generator)
    low, high = clouds.amin((1, 2)), clouds.amax((1, 2))
    assert torch.equal(low, torch.zeros(200))
    assert torch.equal(high, torch.ones(200))
    step = (clouds - clouds.roll(1, 2)).square().mean()
    far = (clouds - clouds.roll(16, 2)).square().mean()
    assert step < far / 5  # neighbours are alike, and so are the two edges of the torus
    rough = corruptions.plasma(200, 32, 1.2, torch.Generator().manual_seed(0))
    assert (rough - rough.roll(1, 2)).square().mean() > 2 * step  # detail that fades slowly is rougher
    x = smooth(5)
    y = corruptions.fog(x, 4, torch.Generator().manual_seed(3))
    cloud = corruptions.plasma(5, 32, 1.75, torch.Generator().manual_seed(3))[:, None]
    top = x.amax((1, 2, 3), keepdim=True)
    torch.testing.assert_close(y, (x + 1.5 * cloud) * top / (top + 1.5))


def test_glass_takes_colours_from_above_and_from_the_left():
    """Each of four places a quarter of the time; nothing is blurred at the first severity."""
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    x = torch.stack([rows, columns, rows]).div(255).repeat(500, 1, 1, 1)
    y = corruptions.glass_blur(x, 0, torch.Generator().manual_seed(0)).mul(255).round()
    back = torch.stack([rows, columns]) - y[:, :2]
    assert set(back.unique().tolist()) == {0.0, 1.0}
    assert not back[:, :, :2].any()
    assert not back[:, :, :, :2].any()
    both = (2 * back[:, 0] + back[:, 1])[:, 2:, 2:].flatten().long().bincount() / (500 * 30 * 30)
    torch.testing.assert_close(both, torch.full((4,), 0.25), atol=5 * math.sqrt(0.19 / 450_000), rtol=0.0)


def test_motion_is_half_a_gaussian_along_its_direction():
    point = torch.zeros(4, 1, 65, 65)
    point[:, :, 32, 32] = 1
    for radius, sigma in corruptions.MOTION:
        y = corruptions.moved(point, radius, sigma, torch.tensor([0.0, 90.0, -90.0, 45.0]))[:, 0]
        weights = torch.exp(-torch.arange(2 * radius + 1.0).square() / (2 * sigma**2))
        weights = weights / weights.sum()
        n = len(weights)
        torch.testing.assert_close(y[0, 32, 33 - n : 33].flip(0), weights)  # a pixel looks to its right
        torch.testing.assert_close(y[1, 33 - n : 33, 32].flip(0), weights)
        torch.testing.assert_close(y[2, 32 : 32 + n, 32], weights)
        torch.testing.assert_close(y.sum((1, 2)), torch.ones(4))
        assert torch.equal(y[3] > 0, torch.diag(y[3].diagonal()) > 0)
    assert torch.allclose(corruptions.motion_blur(grey(0.3, 3), 4, torch.Generator()), grey(0.3, 3))


def test_enlarging_is_scipys_zoom_of_the_middle():
    ndimage = pytest.importorskip("scipy.ndimage")
    x = smooth(1)[0].double()
    for factor in (1.0, 1.03, 1.1, 1.25, 1.75, 2.25):
        crop = math.ceil(32 / factor)
        top = (32 - crop) // 2
        whole = ndimage.zoom(x[:, top : top + crop, top : top + crop].numpy(), (1, factor, factor), order=1)
        trim = (whole.shape[1] - 32) // 2
        weights = corruptions.enlarged(32, factor)
        expected = torch.from_numpy(whole[:, trim : trim + 32, trim : trim + 32])
        torch.testing.assert_close(weights @ x @ weights.mT, expected)
    assert torch.allclose(corruptions.zoom_blur(grey(0.3, 1), 4, torch.Generator()), grey(0.3, 1))


def test_snow_falls_on_both_sides_and_frost_is_laid_over():
    for s in range(5):
        share, x = corruptions.SNOW[s][-1], grey(0.0, 40)
        y = corruptions.snow(x, s, torch.Generator().manual_seed(s)) - 0.5 * (1 - share)  # black becomes grey
        torch.testing.assert_close(y, y.flip(2, 3))
        assert float(y.min()) > -1e-6
        assert 0.01 < float((y > 0.02).double().mean()) < 0.99
        keep, weight = corruptions.FROST[s]
        x = smooth(5)
        frost = (corruptions.synthetic_frost(x, s, torch.Generator().manual_seed(1)) - keep * x) / weight
        again = corruptions.synthetic_frost(torch.zeros_like(x), s, torch.Generator().manual_seed(1)) / weight
        torch.testing.assert_close(frost, again, atol=1e-5, rtol=1e-5)
        assert 0.26 < float(frost.min()) < float(frost.max()) <= 1.0
    assert len(corruptions.COMMON) == 15


def test_pixelate_and_jpeg_are_pillows():
    x = smooth(5)
    for s in SEVERITIES:
        boxed, packed = corrupt(x, "pixelate", s), corrupt(x, "jpeg_compression", s)
        for i, picture in enumerate(as_bytes(x).permute(0, 2, 3, 1).numpy()):
            small = int(32 * corruptions.SMALLER[s - 1])
            pil = Image.fromarray(picture).resize((small, small), Image.Resampling.BOX)
            expected = np.asarray(pil.resize((32, 32), Image.Resampling.BOX)).astype(int)
            assert np.abs(boxed[i].permute(1, 2, 0).numpy() - expected).max() <= 1  # Pillow rounds on the way
            file = io.BytesIO()
            Image.fromarray(picture).save(file, "JPEG", quality=corruptions.QUALITY[s - 1])
            assert np.array_equal(packed[i].permute(1, 2, 0).numpy(), np.asarray(Image.open(file)))


def test_elastic_moves_pixels_and_leaves_colours():
    """A ramp shows where each pixel came from; the middle moves by as much as its three corners allow."""
    ramp = (torch.arange(32.0) / 31).expand(400, 1, 32, 32).contiguous()
    y = corruptions.elastic_transform(ramp, 0, torch.Generator().manual_seed(0))
    moved = (y - ramp)[:, 0, 12:20, 12:20] * 31
    # An affine map through three corners: at the centre x moves by half of two corners, 2.56·U(−1, 1) each.
    centre = moved[:, 4, 4]
    assert float(centre.abs().max()) < 2 * 2.56
    assert float(centre.mean()) == pytest.approx(0, abs=5 * 2.56 / math.sqrt(3 * 400))
    second = moved[:, :, 2:] - 2 * moved[:, :, 1:-1] + moved[:, :, :-2]
    assert float(second.abs().max()) < 1e-3  # straight lines stay straight …
    bent = (corruptions.elastic_transform(ramp, 4, torch.Generator().manual_seed(0)) - ramp)[:, 0, 12:20, 12:20] * 31
    curved = bent[:, :, 2:] - 2 * bent[:, :, 1:-1] + bent[:, :, :-2]
    assert float(curved.abs().mean()) > 0.1  # … until pixels move each its own way
    assert torch.allclose(corruptions.elastic_transform(grey(0.3, 3), 4, torch.Generator()), grey(0.3, 3))


def test_what_is_wrong_is_named(monkeypatch):
    x = smooth(1)
    for arguments, words in (
        ((x, "frost", 1), "name='frost'"),
        ((x, "fog", 6), "severity=6"),
        ((x, "fog", 0), "severity=0"),
        ((x[0], "fog", 1), r"images\.shape"),
        ((x.repeat(1, 1, 2, 1), "fog", 1), r"images\.shape"),
        ((x * 2, "fog", 1), "before any normalisation"),
        ((x * math.nan, "fog", 1), "before any normalisation"),
        ((as_bytes(x), "fog", 1), "uint8"),
    ):
        with pytest.raises(ArgumentError, match=words):
            corrupt(*arguments)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ArgumentError, match=r"jpeg_compression.*needs Pillow.*leave this corruption out"):
        corrupt(x, "jpeg_compression", 1)
