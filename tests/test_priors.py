"""Random processes, and what is learned from them for any network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import dpivon
import dpivon.priors
from dpivon.cli import app
from dpivon.data import images as data_images
from dpivon.errors import ArgumentError
from dpivon.models import SmallCNN
from dpivon.priors import MIXTURES, PROCESSES, images, learning

SMALL = {"steps": 3, "batch": 8, "pool": 16, "fresh": 4, "every": 2, "warmup": 2}


def made(name: str, seed: int, n: int = 6, size: int = 20, channels: int = 3) -> torch.Tensor:
    return images(name, n, torch.Generator().manual_seed(seed), size, channels)


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_seed_decides_the_images(name: str) -> None:
    first, again, other = made(name, 1), made(name, 1), made(name, 2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.dtype == torch.uint8
    assert len(first.flatten(1).unique(dim=0)) == len(first)  # no two alike


@pytest.mark.campaign(keep=5)
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize(("size", "channels"), [(17, 1), (40, 4)])
def test_any_size_and_channels(name: str, size: int, channels: int) -> None:
    x = made(name, 0, 5, size, channels)
    assert x.shape == (5, channels, size, size)
    assert (x.flatten(1).float().std(1) > 5).all()  # none is flat


def test_spectra_fall_with_frequency() -> None:
    power = torch.fft.rfft2(made("spectra", 0, 64, 32).float()).abs().square().mean((0, 1))
    assert power[1:3, 1:3].mean() > 10 * power[12:16, 12:16].mean()


def test_strokes_are_ink_on_blank_paper_and_fill_it() -> None:
    ink = PROCESSES["strokes"](64, 24, 2, torch.Generator().manual_seed(0))
    assert torch.equal(ink[:, 0], ink[:, 1])
    assert ((ink == 0) | (ink == 1)).float().mean() > 0.7  # an edge is one pixel wide
    share = ink.mean((1, 2, 3))
    assert 0.03 < share.min() < share.max() < 0.7
    extent = torch.stack([(ink[:, 0].amax(axis) > 0).sum(1) for axis in (1, 2)]).amax(0)
    assert extent.min() >= 0.8 * 24
    assert extent.max() <= 24


def test_uniformity_is_that_of_all_pairs() -> None:
    z = nn.functional.normalize(torch.randn(9, 5, dtype=torch.float64), dim=1)
    expected = torch.pdist(z).square().mul(-2).exp().mean().log()
    torch.testing.assert_close(learning.uniformity(z), expected)


def test_views_are_of_the_input_range_and_differ() -> None:
    x, draws = made("leaves", 0, 4, 48), torch.rand(8, learning.DRAWS, generator=torch.Generator().manual_seed(0))
    seen = learning.views(torch.cat([x, x]), draws)
    assert seen.shape == (8, 3, 32, 32)
    assert seen.abs().max() <= 2.0
    assert not torch.equal(seen[:4], seen[4:])


def test_inputs_are_normalised_as_data_is() -> None:
    assert (learning.MEAN, learning.STD) == (data_images.MEAN, data_images.STD)


def test_a_prior_of_any_network_is_one_for_fit_and_goes_on_for_longer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, out = SmallCNN(in_channels=1, image_size=8, classes=4), tmp_path / "prior.safetensors"
    options = {"process": "spectra", "seconds": 1e9, "shape": (1, 8), "device": "cpu"}
    first = dpivon.priors.learn(network, out, **options, **SMALL)
    last = [name for name, _ in network.named_parameters()][-2:]
    assert all(not first.mean[name].any() for name in last)
    rest = [name for name, _ in network.named_parameters() if name not in last]
    assert all(not torch.equal(first.mean[name], network.get_parameter(name)) for name in rest)
    assert first.matches(network)
    longer = dpivon.priors.learn(network, out, **options, **SMALL | {"steps": 4})
    state = learning.state_of(out)
    assert learning.read_tensors(state, key=learning.FORMAT, version="1", what="", fix="")[1]["steps"] == "4"
    assert not torch.equal(first.mean[rest[0]], longer.mean[rest[0]])
    with pytest.raises(ArgumentError, match="is of process 'spectra', not 'gabor'"):
        dpivon.priors.learn(network, out, **options | {"process": "gabor"}, **SMALL)
    x, y = torch.randn(40, 1, 8, 8), torch.randint(0, 4, (40,))
    common = {
        "method": "dp-ivon-gradsq",
        "lr": 0.1,
        "batch_size": 8,
        "epochs": 1,
        "noise_multiplier": 1.0,
        "delta": 1e-3,
    }
    assert dpivon.fit(network, x, y, prior=out, **common).posterior.matches(network)


def test_a_command_learns_a_prior(tmp_path: Path) -> None:
    out = tmp_path / "p.safetensors"
    words = ["prior", "learn", "--network", "small", "--side", "8", "--channels", "1", "--process", "spectra"]
    found = CliRunner().invoke(app, [*words, "--steps", "1", "--batch", "4", "--pool", "8", "--out", str(out)])
    assert found.exit_code == 0, found.output
    assert dpivon.Posterior.load(out).metadata["process"] == "spectra"
    found = CliRunner().invoke(app, ["prior", "learn", "--process", "clouds", "--out", str(out)])
    assert found.exit_code == 2
    assert "process='clouds'" in found.output


def test_a_network_without_a_linear_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="network='Conv2d': has no linear layer"):
        dpivon.priors.learn(nn.Conv2d(3, 3, 1), tmp_path / "p.safetensors")
